"""Names and numbers separated by commas on the command line, and the bar of a run, which fits 80 columns."""

import io
import re

import pytest
from rich.console import Console
from rich.progress import Task
from typer.testing import CliRunner

from fedsim.commands import progress
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.settings.experiment import read_experiment

SWEEP = ["sweep", "digits", "--dry-run", "--set", "train.rounds=1"]


@pytest.mark.parametrize(("words", "cells"), [
    (["--targets", "all"], 6),
    (["--targets", " rot0 , rot15 ", "--methods", "fedavg, fedprox", "--seeds", "0, 1"], 8),
    (["--targets", "rot0", "--methods", "", "--seeds", ""], 1),
])  # fmt: skip
def test_blanks_do_not_matter_and_an_empty_option_is_not_given(tmp_path, words, cells):
    shown = CliRunner().invoke(app, [*SWEEP, "--output", str(tmp_path), *words])
    assert shown.exit_code == 0, shown.exception
    assert f"{cells} cell{'s' if cells > 1 else ''}, " in shown.output


@pytest.mark.parametrize("verb", ["sweep", "compare", "plot", "report"])
def test_empty_names_and_wrong_seeds_are_refused(tmp_path, verb):
    words = SWEEP if verb == "sweep" else [verb, str(tmp_path)]
    for option, text in (("--targets", "rot0,"), ("--methods", ",")):
        with pytest.raises(UserError, match=f"{option} '{text}': a name is empty"):
            raise CliRunner().invoke(app, [*words, option, text]).exception
    for seeds in ("²", "1,,2", "-1"):
        with pytest.raises(UserError, match=f"--seeds '{seeds}'.*: give whole numbers separated by commas"):
            raise CliRunner().invoke(app, [*words, f"--seeds={seeds}"]).exception


@pytest.mark.parametrize(("width", "method", "target", "rounds", "seconds", "expected"), [
    (80, "gperxan+fedprox", "art_painting", 100, 7300, r"gperxa.* 2:01:40 left"),
    (80, "fedavg", "rot75", 40, 0, r"fedavg .* 00:00 in all"),  # after the last round nothing is left
    (160, "gperxan+fedprox", "art_painting", 100, 12, r"gperxan\+fedprox → art_painting \(seed 0\) ━.* 00:12 left"),
])  # fmt: skip
def test_nothing_of_the_bar_is_cut(monkeypatch, tmp_path, width, method, target, rounds, seconds, expected):
    terminal = Console(width=width, file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(progress, "errors", terminal)
    monkeypatch.setattr(Task, "time_remaining", seconds)
    bar = progress.ProgressBar()
    words = [f"method.name={method}", f"run.target={target}", f"train.rounds={rounds}"]
    bar.on_start(read_experiment("pacs" if target == "art_painting" else "digits", words), tmp_path)
    last = rounds - (seconds != 0)
    for round_ in range(rounds - 1, last + 1):
        bar.on_round({"round": round_, "mean_validation_accuracy": 1.0, "target_accuracy": 1.0}, [])
    bar.close()
    lines = terminal.file.getvalue().replace("\r", "\n").split("\n")
    shown = [re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", line).strip() for line in lines]
    line = [line for line in shown if line][-1]
    assert len(line) <= width
    assert re.fullmatch(expected, line)
    found = re.search(rf"([━╸╺]+) +{last}/{rounds} validation 100.0, target 100.0 % ", line)
    assert width == 80 or 30 < len(found[1]) <= 40
