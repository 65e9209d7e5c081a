"""TensorBoard, W&B and MLflow (the real libraries, without a network): what a run and its continuation leave there."""

import math
import re
import struct
import sys
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock, call

import pandas as pd
import pytest
from invented import pacs_experiment
from processes import until
from support import Interrupt, run_small, tiny_experiment

from fedsim.common.errors import UserError
from fedsim.records.callbacks import TensorBoardCallback, find_callback
from fedsim.records.trackers import MLflow

ROUNDS = 3


def broken_and_continued(tmp_path, tracker):
    """A run that is stopped after round 1 and then finished, both times with the tracker; its folder."""
    experiment = tiny_experiment(tmp_path, rounds=ROUNDS)
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, find_callback(tracker)(), Interrupt(1))
    return run_small(tiny_experiment(tmp_path, rounds=ROUNDS, run={"callbacks": [tracker]}))[0]


def records_of(content):
    """The records of a W&B file: LevelDB's log format after seven bytes, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, whole = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # no header fits into the rest of the block
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.parametrize(("name", "said"), [
    *((name, f"has '{name}', which is not installed: pip install 'feddg-sim[{name}]'") for name in ("wandb", "mlflow")),
    ("fedsim.records.callbacks:TensorBoardCallback", "pip install"), (":Name", "not of the form"),
    ("no_such_module:Name", "No module named 'no_such_module'; install it"),
    ("json:Encoder", "json has no 'Encoder'; did you mean 'JSONEncoder'"),
    ("pathlib:Path", "has no on_start, on_round, on_end; see RunCallback in fedsim.records.callbacks"),
    ("math:pi", "neither a class nor a function"),
])  # fmt: skip
def test_a_callback_that_is_not_there_is_said_in_one_line(monkeypatch, name, said):
    for module in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=re.escape(said)) as error:
        find_callback(name)()
    assert "\n" not in str(error.value)
    assert name in str(error.value) or "TensorBoard" in name


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny (extra mlflow)")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    with pytest.raises(UserError, match=r"MLflow cannot write to file:.*MLFLOW_ALLOW_FILE_STORE"):
        MLflow().on_start(tiny_experiment(tmp_path), tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = broken_and_continued(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["fedsim.folder"] == str(folder)
    assert run.data.params["train.batch_size"] == "8"
    rounds = pd.read_csv(folder / "rounds.csv")
    accuracy = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "round/target_accuracy")}
    assert accuracy == dict(zip(rounds["round"], rounds["target_accuracy"]))
    assert set(accuracy) == set(range(ROUNDS + 1))
    summary = pd.read_csv(folder / "summary.csv").iloc[0]
    assert run.data.metrics["summary/last_target_accuracy"] == summary["last_target_accuracy"]
    failed = MLflow()
    failed.on_start(tiny_experiment(tmp_path, rounds=1), tmp_path / "other")
    failed.on_failure(RuntimeError("no memory"))
    assert {one.info.status for one in client.search_runs([run.info.experiment_id])} == {"FINISHED", "FAILED"}


def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb (extra wandb)")
    from google.protobuf.message import DecodeError

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = broken_and_continued(tmp_path, "wandb")
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))

    def all_records():  # W&B's own process writes them, and goes on for a moment after the run's end
        with suppress(DecodeError):  # the last record is half written
            found = [record for file in files for record in records_of(file.read_bytes())]
            return found if sum(record.HasField("exit") for record in found) == 2 else []
        return []

    records = until(all_records, 60, "end of the records")
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.project, run.display_name) for run in runs} == {("small", "fedavg rot45 seed 0")}
    assert len({run.run_id for run in runs}) == 1  # both halves are one run
    found = {}
    for record in records:
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            found[int(items["_step"])] = float(items["round/target_accuracy"])
    rounds = pd.read_csv(folder / "rounds.csv")
    assert found == pytest.approx(dict(zip(rounds["round"], rounds["target_accuracy"])))
    exits = [record.exit.exit_code for record in records if record.HasField("exit")]
    assert exits == [1, 0]


def test_scalars_are_written(tmp_path, monkeypatch):
    writer = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    callback = TensorBoardCallback()
    callback.on_start(pacs_experiment(), tmp_path)
    clients = [{"round": 4, "client": "photo/0", "status": "ok", "gap": 0.25}]
    callback.on_round({"round": 4, "target_accuracy": 0.5, "train_loss": math.nan, "failed": 0}, clients)
    callback.on_end({})
    scalars = [("round/target_accuracy", 0.5, 4), ("round/failed", 0.0, 4), ("photo/0/gap", 0.25, 4)]
    opened = [call(str(tmp_path / "tensorboard"), purge_step=4), *(call().add_scalar(*scalar) for scalar in scalars)]
    assert writer.mock_calls == [*opened, call().flush(), call().close()]
