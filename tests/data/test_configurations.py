"""A shipped configuration of a data set that is not at hand runs for a round on a small tree of the same layout."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
from published_trees import camelyon17, classes, digits_dg, fed_isic2019, prostate

from fedsim.data import BENCHMARKS, benchmark, load_client
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import read_experiment

SITES = ("BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL")
THINGS = [f"thing_{number:03d}" for number in range(345)]
OFFICE_31 = read_experiment("office-31").data
OFFICE = partial(classes, domains=tuple(OFFICE_31.domains), names=OFFICE_31.classes, count=2)


class Layout(NamedTuple):
    """tree: what writes the images into a folder; changes: settings that make the run small."""

    tree: Callable[[Path], None]
    changes: tuple[str, ...] = ()
    preset: str = ""


SMALL = ("data.image_size=32", "model.backbone=small-cnn")
CALTECH = partial(
    classes,
    domains=BENCHMARKS["office-caltech-10"].domains,
    names=list(BENCHMARKS["office-caltech-10"].classes),
)
LAYOUTS = {
    "domainnet": Layout(
        partial(classes, domains=("clipart", "real", "sketch"), names=THINGS, count=1),
        ("data.domains=['clipart','real','sketch']", *SMALL),
    ),
    "digits-dg": Layout(digits_dg),
    "office-31": Layout(partial(OFFICE, below="images"), ("data.image_size=32",)),
    "office-caltech-10": Layout(CALTECH, ("data.image_size=32",)),
    "office-caltech-10 fedfa": Layout(CALTECH, SMALL, "fedfa"),
    "fed-isic2019": Layout(fed_isic2019, ("data.image_size=32", "model.options={drop_rate=0.0}")),
    "fed-isic2019 weighted": Layout(fed_isic2019, SMALL, "weighted"),
    "camelyon17 wilds": Layout(camelyon17, ("data.image_size=32",), "wilds"),
    "prostate": Layout(partial(prostate, domains=SITES), ("data.image_size=32", "data.group=folder")),
}


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Function (name of a case) -> the configuration's experiment on its tree, one round of one step."""

    def make(case: str):
        layout, name = LAYOUTS[case], case.partition(" ")[0]
        if name in BENCHMARKS:
            monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], counts=None, class_counts=None))
        root = tmp_path / "images"
        root.mkdir()
        layout.tree(root)
        folders = (f"data.root={root}", f"data.cache={tmp_path / 'cache'}", f"run.output={tmp_path / 'out'}")
        work = ("train.rounds=1", "train.iterations=1", "train.batch_size=4", "train.warmup_rounds=0")
        machine = ("model.weights=none", "run.device=cpu", "run.threads=1")
        return read_experiment(name, [*folders, *work, *machine, *layout.changes], preset=layout.preset)

    return make


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_round_on_a_tree_of_the_same_layout(case, experiment):
    settings = experiment(case)
    folder = launch(settings)
    rounds = pd.read_csv(folder / "rounds.csv")
    metric = "dice" if case == "prostate" else "accuracy"
    assert rounds["round"].tolist() == [0, 1]
    assert rounds[f"target_{metric}"].between(0, 1).all()
    assert rounds["train_loss"].iloc[1] > 0
    clients = pd.read_csv(folder / "clients.csv")
    unseen = {settings.run.target or benchmark(settings.data).domains[-1], settings.run.validation_domain}
    assert set(clients["client"]) == set(benchmark(settings.data).domains) - unseen


def test_the_official_split_of_wilds(experiment):
    """Twelve patches a hospital, of which every fourth has a 1 in the column split."""
    settings = experiment("camelyon17 wilds")
    assert (settings.run.target, settings.run.validation_domain) == ("hospital_2", "hospital_1")
    client = load_client(settings.data, "hospital_3")
    assert (len(client.train), len(client.validation)) == (9, 3)
