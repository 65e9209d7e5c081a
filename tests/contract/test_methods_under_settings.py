"""Every row of METHODS with settings that most rows' own tests leave at their defaults.

A run either ends with a finite loss, or is refused in one line before or while it runs. `pytest -m slow` runs all rows.
"""

import math

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from support import run_small

from fedsim.commands.contract import small_plan
from fedsim.common.errors import UserError
from fedsim.methods.table import METHODS
from fedsim.run.workspace import close_workspaces

SETTINGS = {
    "adam": ["train.optimizer=adam", "train.schedule=cosine"],
    "bf16": ["train.precision=bf16"],
    "head": ["model.train=head"],
    "norm and head": ["model.train=norm+head"],
    "bottleneck": ["model.bottleneck=8"],
    "several clients of a domain": ["data.clients_per_domain=3", "train.clients_per_round=4"],
    "mixed domains": ["data.mix=0.5", "train.evaluate_clients=drawn"],
    "local checks": ["train.local_checks=1"],
    "noise": ["train.dp_clip=0.01", "model.backbone=digits-cnn"],
    "side by side": ["train.side_by_side=3"],
    "own models": ["run.personalised=true", "train.persist_optimizer=true", "train.weight_decay=0.001"],
}
PHOTOGRAPHS = [
    "data.dataset=folder", "data.domains=[]", "data.image_size=32", "data.augment=domainbed", "data.normalize=imagenet",
    "data.fraction=1.0", "model.backbone=resnet18", "train.iterations=2", "train.batch_size=4",
]  # fmt: skip
# `l2d` differentiates through the normalization, `rsc` with respect to the features.
FAST = [("l2d", "photographs"), ("rsc", "head")]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """The settings of a folder with four domains of two classes."""
    root = tmp_path_factory.mktemp("photographs")
    for number in range(4 * 2 * 8):
        domain, label, index = number // 16, number // 8 % 2, number % 8
        file = root / f"domain{domain}" / f"class{label}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    return [*PHOTOGRAPHS, f"data.root={root}", f"data.cache={root}-cache", "run.target=domain3"]


def ends(method, folder, settings):
    """Whether the run ended with a finite loss; False when it was refused."""
    refusal = ""
    try:
        run, _ = run_small(small_plan(method, folder, [*settings, "train.rounds=2"]).experiment)
    except UserError as error:
        refusal = str(error)
    finally:
        close_workspaces()
    if refusal:
        assert "\n" not in refusal
        return False
    losses = pd.read_csv(run / "rounds.csv")["train_loss"].iloc[1:]
    assert all(math.isfinite(loss) for loss in losses), losses.tolist()
    return True


@pytest.mark.parametrize(("method", "name"), FAST)
def test_one_row(method, name, tmp_path, photographs):
    assert ends(method, tmp_path, SETTINGS.get(name, photographs))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETTINGS, "photographs"])
def test_all_rows(name, tmp_path, photographs):
    ended = [method for method in METHODS if ends(method, tmp_path / method, SETTINGS.get(name, photographs))]
    assert "fedavg" in ended
    assert len(ended) > len(METHODS) / 2, ended
