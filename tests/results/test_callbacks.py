"""Callbacks: TensorBoard writes into the run's folder, others are found by name, and a missing one is one line."""

import math
import re
import sys
from types import SimpleNamespace

import pytest
from invented import pacs_experiment

from fedsim.common.errors import UserError
from fedsim.results.callbacks import TensorBoardCallback, find_callback, trackers
from fedsim.settings import RunSettings


def test_scalars_are_written(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, *scalar):
            written.append(scalar)

        def __getattr__(self, name):
            return lambda: written.append(name)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    callback = TensorBoardCallback()
    callback.on_start(pacs_experiment(), tmp_path)
    clients = [{"round": 4, "client": "photo/0", "status": "ok", "gap": 0.25}]
    callback.on_round({"round": 4, "target_accuracy": 0.5, "train_loss": math.nan, "failed": 0}, clients)
    callback.on_end({})
    assert written == [
        (str(tmp_path / "tensorboard"), 4),
        ("round/target_accuracy", 0.5, 4),
        ("round/failed", 0.0, 4),
        ("photo/0/gap", 0.25, 4),
        "flush",
        "close",
    ]


def test_missing_tensorboard_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="pip install"):
        TensorBoardCallback()


@pytest.mark.parametrize(("name", "said"), [
    ("nocolon", "not of the form package.module:name"), (":Name", "not of the form"),
    ("no_such_module:Name", "No module named 'no_such_module'; install it"),
    ("json:Encoder", "json has no 'Encoder'; did you mean 'JSONEncoder'"),
    ("pathlib:Path", "has no on_start, on_round, on_end; see RunCallback in fedsim.results.callbacks"),
    ("math:pi", "neither a class nor a function"),
])  # fmt: skip
def test_a_callback_that_is_not_there_is_said_in_one_line(name, said):
    with pytest.raises(UserError, match=re.escape(said)) as error:
        find_callback(name)
    assert "\n" not in str(error.value)
    assert repr(name) in str(error.value)


def test_callbacks_come_from_the_working_folder_and_may_be_functions(tmp_path, monkeypatch):
    text = "class Tracker:\n    on_start = on_round = on_end = None\n\ndef make():\n    return Tracker()\n"
    (tmp_path / "my_own_trackers.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = RunSettings(callbacks=["my_own_trackers:Tracker", "my_own_trackers:make"])
    made = trackers(run)
    assert [type(each).__name__ for each in made] == ["Tracker", "Tracker"]
    assert made[0] is not trackers(run)[0]
