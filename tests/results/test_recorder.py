"""Recorder: rows are complete, equal numbers give equal bytes, and truncation removes later rounds exactly."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.common.files import atomic_write
from fedsim.results import Recorder
from fedsim.results.reading import parse_csv
from fedsim.results.recorder import CLIENT_COLUMNS, ROUND_COLUMNS

FILES = ("rounds.csv", "clients.csv", "details.csv")


def record(folder, rounds, start=0):
    recorder = Recorder(folder)
    for round_ in range(start, rounds + 1):
        base = {"round": round_, "status": "ok", "train_loss": 0.1 * round_}
        clients = [base | {"client": name, "domain": name} for name in "ab"]
        if round_ >= 2:
            clients[0]["gap"] = 1 / 3 * round_
        recorder.append_clients(clients)
        recorder.append_details([{"round": round_, "client": "a", "quantity": "alpha", "name": "bn1", "value": 0.1}])
        row = {"round": round_, "mean_validation_accuracy": 0.1 + 0.2 * round_}
        recorder.append_round(row | ({"extra": 7} if round_ >= 3 else {}))
    return {name: (folder / name).read_bytes() for name in FILES}


@given(value=st.floats(allow_infinity=True, allow_nan=True))
@settings(max_examples=50)
def test_numbers_survive_the_round_trip(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("run")
    Recorder(folder).append_round({"round": 1, "train_loss": np.float64(value), "clients": np.int64(3)})
    row = parse_csv((folder / "rounds.csv").read_text(), "rounds.csv").iloc[0]
    assert float(row["train_loss"]) == value or (math.isnan(float(row["train_loss"])) and math.isnan(value))
    assert row["clients"] == 3


def test_standard_columns_lead_and_new_ones_follow(tmp_path):
    record(tmp_path, 3)
    lines = (tmp_path / "clients.csv").read_text().splitlines()
    assert lines[0] == ",".join([*CLIENT_COLUMNS, "gap"])
    assert lines[1].startswith("0,a,a,ok,,,,,0.0,")
    assert lines[5].endswith(repr(2 / 3))
    assert lines[1][-1] == lines[6][-1] == ","
    assert (tmp_path / "rounds.csv").read_text().splitlines()[0] == ",".join([*ROUND_COLUMNS, "extra"])
    assert len({line.count(",") for line in lines}) == 1


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
    recorder.append_clients([{"round": 1, "client": "a", "status": 'KeyError: "a, b"\nline two'}])
    recorder.append_clients([{"round": 2, "client": "a", "status": "ok", "gap": 1.0}])
    recorder.truncate(1)
    text = (tmp_path / "clients.csv").read_text()
    assert len(text.splitlines()) == 2
    assert parse_csv(text, "clients.csv")["status"][0] == 'KeyError: "a, b" line two'


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path):
    atomic_write(tmp_path / "summary.csv", "old")
    with pytest.raises(TypeError):
        atomic_write(tmp_path / "summary.csv", None)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("summary.csv", "old")]
