"""The bar of a run fits a terminal of 80 columns: its name, round, scores and time left are on one line."""

import io
import re

import pytest
from rich.console import Console
from rich.progress import Task

from fedsim.commands import progress
from fedsim.settings.experiment import read_experiment

END = 0  # seconds that are left after the last round


def line_of(monkeypatch, tmp_path, width, method, target, rounds, seconds):
    """The bar's line in a terminal of that width, with the highest scores and so many seconds left."""
    terminal = Console(width=width, file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(progress, "errors", terminal)
    monkeypatch.setattr(Task, "time_remaining", seconds)
    bar = progress.ProgressBar()
    words = [f"method.name={method}", f"run.target={target}", f"train.rounds={rounds}"]
    bar.on_start(read_experiment("pacs" if target == "art_painting" else "digits", words), tmp_path)
    bar.on_round({"round": rounds - 1, "mean_validation_accuracy": 1.0, "target_accuracy": 1.0}, [])
    if seconds is END:
        bar.on_round({"round": rounds, "mean_validation_accuracy": 1.0, "target_accuracy": 1.0}, [])
    bar.close()
    lines = terminal.file.getvalue().replace("\r", "\n").split("\n")
    shown = [re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", line).strip() for line in lines]
    return [line for line in shown if line][-1]


@pytest.mark.parametrize(
    ("method", "target", "rounds", "seconds"),
    [
        ("fedavg", "rot75", 40, 12),
        ("gperxan+fedprox", "art_painting", 100, 7300),
        ("fedprox", "rot0", 10, None),
    ],
)
def test_nothing_of_the_bar_is_cut_at_80_columns(monkeypatch, tmp_path, method, target, rounds, seconds):
    line = line_of(monkeypatch, tmp_path, 80, method, target, rounds, seconds)
    assert len(line) <= 80
    assert line.startswith(f"fedavg → {target} (seed 0) " if method == "fedavg" else method[:6])
    left = {12: "00:12", 7300: "2:01:40", None: "--:--"}[seconds]
    assert line.endswith(f"validation 100.0, target 100.0 % {left} left")
    assert re.search(rf"[━╸╺]+ +{rounds - 1}/{rounds} ", line), "a bar is there, and the round"


def test_a_wide_terminal_shows_the_whole_name_and_a_wider_bar(monkeypatch, tmp_path):
    line = line_of(monkeypatch, tmp_path, 160, "gperxan+fedprox", "art_painting", 100, 12)
    assert line.startswith("gperxan+fedprox → art_painting (seed 0) ━")
    assert 30 < len(re.search("[━╸╺]+", line).group()) <= 40


def test_the_time_after_the_last_round_is_not_called_left(monkeypatch, tmp_path):
    line = line_of(monkeypatch, tmp_path, 80, "fedavg", "rot75", 40, END)
    assert re.search(r"fedavg .* ━+ 40/40 validation 100.0, target 100.0 % 00:00 in all$", line)
