"""The bar of a run fits a terminal of 80 columns: its name, round, scores and time left are on one line."""

import io
import re

import pytest
from rich.console import Console
from rich.progress import Task

from fedsim.commands import progress
from fedsim.settings.experiment import read_experiment


@pytest.mark.parametrize(("width", "method", "target", "rounds", "seconds", "expected"), [
    (80, "fedavg", "rot75", 40, 12, r"fedavg → rot75 \(seed 0\) .* 00:12 left"),
    (80, "gperxan+fedprox", "art_painting", 100, 7300, r"gperxa.* 2:01:40 left"),
    (80, "fedprox", "rot0", 10, None, r"fedpro.* --:-- left"),
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
