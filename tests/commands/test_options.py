"""Names and numbers that are separated by commas on the command line."""

import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.sweep.axes import Axes, check_axes

SWEEP = ["sweep", "digits", "--dry-run", "--set", "train.rounds=1"]


def sweep(tmp_path, *words):
    return CliRunner().invoke(app, [*SWEEP, "--output", str(tmp_path), *words])


@pytest.mark.parametrize(
    ("words", "cells"),
    [
        (["--targets", " rot0 , rot15 "], 2),
        (["--targets", ""], 6),
        (["--targets", "all"], 6),
        (["--targets", "rot0", "--methods", "fedavg, fedprox", "--seeds", "0, 1"], 4),
        (["--targets", "rot0", "--methods", "", "--seeds", ""], 1),
    ],
)
def test_blanks_do_not_matter_and_an_empty_option_is_not_given(tmp_path, words, cells):
    shown = sweep(tmp_path, *words)
    assert shown.exit_code == 0, shown.exception
    assert f"{cells} cell{'s' if cells > 1 else ''}, " in shown.output


@pytest.mark.parametrize("words", [["--targets", "rot0,"], ["--methods", "fedavg,"], ["--targets", ","]])
def test_an_empty_name_is_refused(tmp_path, words):
    with pytest.raises(UserError, match=f"{words[0]} '{words[1]}': a name is empty"):
        raise sweep(tmp_path, *words).exception


@pytest.mark.parametrize("seeds", ["²", "1,,2", "0,", "-1", "x"])
@pytest.mark.parametrize("verb", ["sweep", "compare", "plot", "report"])
def test_seeds_are_whole_numbers(tmp_path, verb, seeds):
    words = SWEEP if verb == "sweep" else [verb, str(tmp_path)]
    with pytest.raises(UserError, match="give whole numbers separated by commas"):
        raise CliRunner().invoke(app, [*words, f"--seeds={seeds}"]).exception


@pytest.mark.parametrize("verb", ["compare", "plot", "report"])
@pytest.mark.parametrize("option", ["--methods", "--targets"])
def test_filters_refuse_an_empty_name_too(tmp_path, verb, option):
    with pytest.raises(UserError, match=f"{option} 'a,': a name is empty"):
        raise CliRunner().invoke(app, [verb, str(tmp_path), option, "a,"]).exception


def test_a_sweep_from_python_refuses_an_empty_target():
    """It would mean the data set's last domain."""
    with pytest.raises(UserError, match="--targets: a name is empty"):
        check_axes(Axes(["fedavg"], ["rot0", ""], [0]), ())
