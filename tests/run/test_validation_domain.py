"""run.validation_domain: a domain on which no one trains selects the round."""

import pandas as pd
import pytest
from image_trees import write_tree
from support import run_small, small_experiment

from fedsim.commands.runs import headline
from fedsim.common.errors import UserError
from fedsim.data import client_names, load_pooled, load_target
from fedsim.results import compare, read_runs
from fedsim.results.differences import comparable_settings
from fedsim.run.plan import complete, resolve
from fedsim.settings.experiment import Experiment
from fedsim.sweep import Axes
from fedsim.sweep.plan import plan_cells

PHOTO = {"validation_domain": "photo"}


@pytest.fixture(scope="module")
def on_images(tmp_path_factory):
    """on_images(output, data, **run) is the small experiment on a tree of four domains of 24 images each."""
    place = tmp_path_factory.mktemp("validation")
    root = write_tree(place / "tree", ("art", "cartoon", "photo", "sketch"), ("cat", "dog"), 12)
    tree = {"dataset": "folder", "root": str(root), "fraction": 1, "image_size": 28}
    tree |= {"domains": ["art", "cartoon", "photo", "sketch"]}

    def make(output="unused", data=(), **run):
        return small_experiment(place / output, data={**tree, **dict(data)}, run={"target": "sketch", **run})

    return make


@pytest.fixture(scope="module")
def held_out(on_images):
    """A run that trains on art and cartoon, selects on photo and is tested on sketch."""
    return run_small(on_images("held-out", **PHOTO))[0]


def test_it_is_measured_as_an_unseen_domain_and_no_one_trains_on_it(held_out, on_images):
    """With photo as the target, the same clients have the same accuracies on it in every round."""
    assert set(pd.read_csv(held_out / "clients.csv")["client"]) == {"art", "cartoon"}
    other, _ = run_small(on_images("target", {"domains": ["art", "cartoon", "photo"]}, target="photo"))
    ours, theirs = (pd.read_csv(folder / "rounds.csv") for folder in (held_out, other))
    assert not ours["validation_domain_accuracy"].isna().any()
    assert ours["validation_domain_accuracy"].tolist() == theirs["target_accuracy"].tolist()
    assert ours["train_loss"].iloc[1:].tolist() == theirs["train_loss"].iloc[1:].tolist()


def test_it_selects_the_round(held_out):
    rounds, summary = pd.read_csv(held_out / "rounds.csv"), pd.read_csv(held_out / "summary.csv").iloc[0]
    trained = rounds[rounds["round"] >= 1]
    best = trained.loc[trained["validation_domain_accuracy"].idxmax()]
    assert summary["best_validation_round"] == best["round"]
    assert summary["best_validation_target_accuracy"] == best["target_accuracy"]
    assert summary["validation_domain"] == "photo"
    assert "(best validation on photo, which no client has)" in headline(held_out)
    assert "The round was selected on photo, on which no one trained." in compare(read_runs(held_out)).notes


def test_the_pooled_client_lacks_it_too(on_images):
    """A share for adaptation is taken from the unseen domain only."""
    experiment = on_images(data={"adapt_share": 0.5}, validation_domain="art")
    assert client_names(experiment.data, "sketch") == ["cartoon", "photo"]
    assert load_pooled(experiment.data, "sketch").domains == ("cartoon", "photo")
    assert resolve(experiment.replace(method={"name": "deepall"})).sources == 2
    assert [len(load_target(experiment.data, name)[2]) for name in ("art", "sketch")] == [24, 12]


@pytest.mark.parametrize(("data", "run", "said"), [
    ({}, {"validation_domain": "sketch"}, "is the unseen domain"),
    ({}, {"validation_domain": "photos"}, "no domain 'photos'"),
    ({}, {**PHOTO, "select_on": "local"}, "leave run.select_on"),
    ({"domains": ["photo", "sketch"]}, PHOTO, "nothing is left to train on"),
])  # fmt: skip
def test_a_wrong_one_is_refused(on_images, data, run, said):
    with pytest.raises(UserError, match=said):
        resolve(complete(on_images(data=data, **run)))


@pytest.mark.parametrize(("dataset", "domain"), [
    ("digits", "rot0"), ("digit-masks", "shaded"), ("rotated-mnist", "M0"),
])  # fmt: skip
def test_domains_that_share_images_select_nothing(dataset, domain):
    """A held-out domain would be the unseen domain's own images, or the clients'; DomainBed's are disjoint."""
    with pytest.raises(UserError, match=r"run\.validation_domain: the domains of .* show the same images"):
        complete(Experiment(data={"dataset": dataset}, run={"validation_domain": domain}))
    if dataset == "rotated-mnist":
        data = {"dataset": dataset, "variant": "domainbed"}
        assert complete(Experiment(data=data, run={"validation_domain": "m0"})).run.validation_domain == "M0"


def test_a_sweep_over_all_targets_leaves_it_out_and_runs_with_and_without_are_not_mixed(tmp_path, on_images):
    ours, plain = on_images(**PHOTO), on_images()
    (tmp_path / "own.toml").write_text(ours.toml())
    cells = plan_cells(str(tmp_path / "own.toml"), Axes(["fedavg"], ["all"], [0]), [], "")
    assert [cell.experiment.run.target for cell in cells] == ["art", "cartoon", "sketch"]
    assert comparable_settings(ours)["run.validation_domain"] == "photo"
    assert ours.settings_hash() != plain.settings_hash()
