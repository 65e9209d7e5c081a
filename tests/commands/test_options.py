"""Names and numbers that are separated by commas on the command line."""

import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.sweep.axes import Axes, check_axes

SWEEP = ["sweep", "digits", "--dry-run", "--set", "train.rounds=1"]


@pytest.mark.parametrize(("words", "cells"), [
    (["--targets", " rot0 , rot15 "], 2),
    (["--targets", ""], 6),
    (["--targets", "all"], 6),
    (["--targets", "rot0", "--methods", "fedavg, fedprox", "--seeds", "0, 1"], 4),
    (["--targets", "rot0", "--methods", "", "--seeds", ""], 1),
])  # fmt: skip
def test_blanks_do_not_matter_and_an_empty_option_is_not_given(tmp_path, words, cells):
    shown = CliRunner().invoke(app, [*SWEEP, "--output", str(tmp_path), *words])
    assert shown.exit_code == 0, shown.exception
    assert f"{cells} cell{'s' if cells > 1 else ''}, " in shown.output


@pytest.mark.parametrize("verb", ["sweep", "compare", "plot", "report"])
def test_empty_names_and_wrong_seeds_are_refused(tmp_path, verb):
    words = SWEEP if verb == "sweep" else [verb, str(tmp_path)]
    for option, text in (("--targets", "rot0,"), ("--methods", "fedavg,"), ("--targets", ",")):
        with pytest.raises(UserError, match=f"{option} '{text}': a name is empty"):
            raise CliRunner().invoke(app, [*words, option, text]).exception
    for seeds in ("²", "1,,2", "0,", "-1", "x"):
        with pytest.raises(UserError, match=f"--seeds '{seeds}'.*: give whole numbers separated by commas"):
            raise CliRunner().invoke(app, [*words, f"--seeds={seeds}"]).exception


def test_a_sweep_from_python_refuses_an_empty_target():
    """It would mean the data set's last domain."""
    with pytest.raises(UserError, match="--targets: a name is empty"):
        check_axes(Axes(["fedavg"], ["rot0", ""], [0]), ())
