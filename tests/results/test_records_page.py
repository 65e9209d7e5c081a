"""The examples of docs/records.md run without changes; its table of columns is that of the records."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from support import Interrupt, run_small, tiny_experiment

from fedsim.results import read_runs
from fedsim.results.reading import KEYS
from fedsim.results.recorder import CLIENT_COLUMNS, DETAIL_COLUMNS, ROUND_COLUMNS
from fedsim.results.selection import RULES

PAGE = (Path(__file__).parents[2] / "docs" / "records.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SUMMARY_COLUMNS = (
    "label", "dataset", "backbone", "split_seed", "rounds", "settings", "transductive", "uses_target_unlabelled",
    "target_images", "R_round", "R_target_accuracy", "R_mean_validation_accuracy", "bytes_down_per_round",
    "bytes_up_per_round", "seconds_per_round", "train_seconds", "images", "steps",
)  # fmt: skip


def block(words: str) -> str:
    (found,) = (text for text in BLOCKS if words in text)
    return found


def test_reading_records_as_in_the_page(own_grid, monkeypatch, capsys):
    shutil.copytree(own_grid, own_grid.parent / "outputs" / "digits")
    monkeypatch.chdir(own_grid.parent)
    names = {}
    exec(compile(block("pivot_table"), "records.md", "exec"), names)
    printed = capsys.readouterr().out
    summary = read_runs("outputs/digits").summary
    own = summary[(summary["method"] == "csac") & (summary["target"] == "sketch")]["best_validation_target_accuracy"]
    assert f"{100 * own.mean():.1f}" in printed
    assert "| csac |" in printed
    assert len(names["weights"]) == 2 * 2 * 2 * 4  # methods, targets, seeds, rounds
    assert names["curves"].loc[("fedavg", 0), "mean"] < names["curves"].loc[("fedavg", 3), "mean"]


@pytest.mark.parametrize(
    ("frame", "columns"),
    [("summary", SUMMARY_COLUMNS), ("rounds", ROUND_COLUMNS), ("clients", CLIENT_COLUMNS), ("details", DETAIL_COLUMNS)],
)
def test_columns_are_as_in_the_page(grid, frame, columns):
    (row,) = re.findall(rf"^\| `{frame}` \|[^|]*\|(.*)\|$", PAGE, re.MULTILINE)
    shown = re.findall(r"`([^`]+)`", row.partition("; then")[0])
    assert [name for name in shown if name not in RULES] == list(columns)
    spread = [name.replace("R_", f"{rule}_", 1) for name in columns for rule in RULES if name.startswith("R_")]
    expected = {*KEYS, *(name for name in columns if not name.startswith("R_")), *spread}
    found = set(getattr(read_runs(grid), frame))
    assert expected <= found
    if frame != "clients":
        assert found == expected


def test_tracker_of_the_page_follows_a_run(tmp_path, monkeypatch, capsys):
    """The settings only name it. It is called at the start, after each round, at the end and after an interruption."""
    (tmp_path / "trackers.py").write_text(block("class Told"))
    monkeypatch.chdir(tmp_path)
    experiment = tiny_experiment("outputs", rounds=3, run={"callbacks": ["trackers:Told"]})
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(1))
    run_small(experiment)
    sys.modules.pop("trackers")
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert words[:-1] == ["fedavg", "0", "stopped:", "fedavg", "2", "3"]
    assert 0 <= float(words[-1]) <= 1
