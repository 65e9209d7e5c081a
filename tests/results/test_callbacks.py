"""TensorBoard callback: scalars land in the run's folder; a missing package is one clear line."""

import math
import sys

import pytest

from fedsim.errors import UserError
from fedsim.results.callbacks import TensorBoardCallback

from .invented import pacs_experiment


def test_scalars_are_written(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, tag, value, step):
            written.append((tag, value, step))

        def flush(self):
            written.append("flush")

        def close(self):
            written.append("close")

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
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
