"""Recorder: rows are complete, equal numbers give equal bytes, and truncation removes later rounds exactly."""

import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from support import interrupt, run_small, tiny_experiment

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write, write_figure
from fedsim.data import domain_of
from fedsim.records import Recorder, read_runs
from fedsim.records.client_rows import MOST_ROWS, client_rows, detail_rows
from fedsim.records.reading import KEYS
from fedsim.records.record_files import parse_csv
from fedsim.records.recorder import CLIENT_COLUMNS, DETAIL_COLUMNS, ROUND_COLUMNS
from fedsim.records.selection import RULES

FILES = ("rounds.csv", "clients.csv", "details.csv")


def record(folder, rounds, start=0):
    recorder = Recorder(folder)
    for round_ in range(start, rounds + 1):
        base = {"round": round_, "status": "ok", "train_loss": 0.1 * round_}
        clients = [base | {"client": name, "domain": name} for name in "ab"]
        if round_ >= 2:
            clients[0]["gap"] = 1 / 3 * round_
        recorder.clients.append(clients)
        recorder.details.append([{"round": round_, "client": "a", "quantity": "alpha", "name": "bn1", "value": 0.1}])
        row = {"round": round_, "mean_validation_accuracy": 0.1 + 0.2 * round_}
        recorder.rounds.append([row | ({"extra": 7} if round_ >= 3 else {})])
    return {name: (folder / name).read_bytes() for name in FILES}


@given(value=st.floats(allow_infinity=True, allow_nan=True))
@settings(max_examples=50)
def test_numbers_survive_the_round_trip(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("run")
    Recorder(folder).rounds.append([{"round": 1, "train_loss": np.float64(value), "clients": np.int64(3)}])
    row = parse_csv((folder / "rounds.csv").read_text(), "rounds.csv").iloc[0]
    assert float(row["train_loss"]) == value or (math.isnan(float(row["train_loss"])) and math.isnan(value))
    assert row["clients"] == 3


@pytest.mark.parametrize("kept", [-1, 0, 1, 2, 3, 4])
def test_truncate_and_go_on_equals_the_unbroken_run(tmp_path, kept):
    unbroken = record(tmp_path / "unbroken", 5)
    record(tmp_path / "broken", 4)
    with (tmp_path / "broken" / "clients.csv").open("a") as file:
        file.write("5,a,a,ok")
    Recorder(tmp_path / "broken").truncate(kept)
    assert record(tmp_path / "broken", 5, start=kept + 1) == unbroken


@pytest.mark.parametrize("cut", [*range(1, 60, 7), 1000])
def test_a_half_written_last_line_or_header_is_cut_off(tmp_path, cut):
    whole = record(tmp_path, 2)["rounds.csv"]
    left = whole[: max(len(whole) - cut, 13)]
    (tmp_path / "rounds.csv").write_bytes(left)
    Recorder(tmp_path)
    assert (tmp_path / "rounds.csv").read_bytes() == left[: left.rfind(b"\n") + 1]


def test_text_with_line_ends_and_commas_stays_one_line(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.clients.append([{"round": 1, "client": "a", "status": 'KeyError: "a, b"\nline two'}])
    recorder.clients.append([{"round": 2, "client": "a", "status": "ok", "gap": 1.0}])
    recorder.truncate(1)
    text = (tmp_path / "clients.csv").read_text()
    assert len(text.splitlines()) == 2
    assert parse_csv(text, "clients.csv")["status"][0] == 'KeyError: "a, b" line two'


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path):
    atomic_write(tmp_path / "summary.csv", "old")
    with pytest.raises(TypeError):
        atomic_write(tmp_path / "summary.csv", None)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("summary.csv", "old")]
    for name in ("ranks", "ranks.xyz"):
        with pytest.raises(UserError, match=f"{name} names no format of a picture; end it with .png"):
            write_figure(Figure(), tmp_path / name)
    write_figure(Figure(), tmp_path / "ranks.PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks.PNG", "summary.csv"]


def crowd(count):
    n = pd.Series(range(count))
    domain = (n % 3).map({0: "photo", 1: "art", 2: "art"})
    own = {"round": 3, "status": "ok", "bytes_down": 10, "weight": 1 / count, "train_seconds": 0.5, "gap": n * 1.0}
    own |= {"domain": domain, "client": domain + "/" + n.astype(str), "examples": n + 1, "train_loss": n / 7}
    own |= {"validation_accuracy": n % 5 / 5, "validation_examples": 1 + n % 4, "local_validation_accuracy": n % 7 / 7}
    return pd.DataFrame(own).to_dict("records")


def test_a_domain_has_the_sums_and_means_of_its_clients_and_their_details():
    rows = crowd(300)
    rows[5]["status"] = "no reply within 5 s"
    merged = client_rows(rows)
    assert [row["client"] for row in merged] == ["photo/*", "art/*", "art/5"]
    frame = pd.DataFrame(rows).drop(index=5)
    for row in merged[:2]:
        own = frame[frame["domain"] == row["domain"]]
        assert row["clients"] == len(own)
        for column in ("bytes_down", "examples", "weight", "train_seconds", "validation_examples"):
            assert row[column] == pytest.approx(own[column].sum())
        of_validation = dict.fromkeys(("validation_accuracy", "local_validation_accuracy"), "validation_examples")
        for column, weight in {"train_loss": "examples", **of_validation}.items():
            assert row[column] == pytest.approx((own[column] * own[weight]).sum() / own[weight].sum())
        assert row["gap"] == pytest.approx(own["gap"].mean())
    details = [
        {"client": f"{domain}/{number}", "quantity": "coefficient", "name": "head", "value": float(number)}
        for domain in ("art", "photo")
        for number in range(150)
    ]
    details.append({"client": "sketch", "quantity": "dice", "name": "disc", "value": 0.25})
    assert detail_rows(details, MOST_ROWS, domain_of) is details
    rows = crowd(MOST_ROWS)
    assert client_rows(rows) is rows
    assert (len(client_rows(rows, "domains")), client_rows(crowd(300), "clients")) == (2, crowd(300))
    found = [(row["client"], row["value"]) for row in detail_rows(details, 300, domain_of)]
    assert found == [("art/*", 74.5), ("photo/*", 74.5), ("sketch", 0.25)]


PAGE = (Path(__file__).parents[2] / "docs" / "records.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SUMMARY_COLUMNS = (
    "label", "dataset", "backbone", "split_seed", "rounds", "settings", "transductive", "uses_target_unlabelled",
    "pooled", "target_images", "R_round", "R_target_accuracy", "R_mean_validation_accuracy", "bytes_down_per_round",
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


@pytest.mark.parametrize(("frame", "columns"), [
    ("summary", SUMMARY_COLUMNS), ("rounds", ROUND_COLUMNS), ("clients", CLIENT_COLUMNS), ("details", DETAIL_COLUMNS),
])  # fmt: skip
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
    interrupt(experiment, 1)
    run_small(experiment)
    sys.modules.pop("trackers")
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert words[:-1] == ["fedavg", "0", "stopped:", "fedavg", "2", "3"]
    assert 0 <= float(words[-1]) <= 1
