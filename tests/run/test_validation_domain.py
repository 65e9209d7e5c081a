"""run.validation_domain: a domain on which no one trains selects the round."""

import numpy as np
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


@pytest.fixture(scope="module")
def on_images(tmp_path_factory):
    """on_images(output, data, **sections) is the small experiment on a tree of four domains of 24 images each."""
    root = write_tree(tmp_path_factory.mktemp("tree"), ("art", "cartoon", "photo", "sketch"), ("cat", "dog"), 12)

    def make(output, data=(), **sections):
        tree = {"dataset": "folder", "root": str(root), "domains": ["art", "cartoon", "photo", "sketch"], "fraction": 1}
        run = {"target": "sketch", **sections.pop("run", {})}
        return small_experiment(output, data={**tree, "image_size": 28, **dict(data)}, run=run, **sections)

    return make


@pytest.fixture(scope="module")
def held_out(tmp_path_factory, on_images):
    """A run that trains on art and cartoon, selects on photo and is tested on sketch."""
    folder = tmp_path_factory.mktemp("held-out")
    return run_small(on_images(folder, run={"validation_domain": "photo"}))[0]


def test_no_one_trains_on_it(held_out):
    clients = pd.read_csv(held_out / "clients.csv")
    assert set(clients["client"]) == {"art", "cartoon"}
    assert not pd.read_csv(held_out / "rounds.csv")["validation_domain_accuracy"].isna().any()


def test_it_is_measured_as_an_unseen_domain(held_out, tmp_path, on_images):
    """With photo as the target, the same clients have the same accuracies on it in every round."""
    domains = {"domains": ["art", "cartoon", "photo"]}
    other, _ = run_small(on_images(tmp_path, domains, run={"target": "photo"}))
    ours = pd.read_csv(held_out / "rounds.csv")
    theirs = pd.read_csv(other / "rounds.csv")
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
    notes = compare(read_runs(held_out)).notes
    assert "The round was selected on photo, on which no one trained." in notes


def test_the_pooled_client_lacks_it_too(tmp_path, on_images):
    experiment = on_images(tmp_path, run={"validation_domain": "art"})
    assert client_names(experiment.data, "sketch") == ["cartoon", "photo"]
    assert load_pooled(experiment.data, "sketch").domains == ("cartoon", "photo")
    assert resolve(experiment.replace(method={"name": "deepall"})).sources == 2


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"validation_domain": "sketch"}, "is the unseen domain"),
        ({"validation_domain": "photos"}, "no domain 'photos'"),
        ({"validation_domain": "photo", "select_on": "local"}, "leave run.select_on"),
    ],
)
def test_a_wrong_one_is_refused(tmp_path, on_images, run, said):
    with pytest.raises(UserError, match=said):
        on_images(tmp_path, run=run)


def test_something_must_be_left_to_train_on(tmp_path, on_images):
    domains = {"domains": ["photo", "sketch"]}
    with pytest.raises(UserError, match="nothing is left to train on"):
        resolve(complete(on_images(tmp_path, domains, run={"validation_domain": "photo"})))


def test_a_sweep_over_all_targets_leaves_it_out(tmp_path):
    words = ["run.validation_domain=cartoon", f"run.output={tmp_path}"]
    cells = plan_cells("pacs", Axes(["fedavg"], ["all"], [0]), words, "")
    assert [cell.experiment.run.target for cell in cells] == ["art_painting", "photo", "sketch"]


def test_runs_with_and_without_are_not_mixed(tmp_path, on_images):
    ours = comparable_settings(on_images(tmp_path, run={"validation_domain": "photo"}))
    assert ours["run.validation_domain"] == "photo"
    plain = on_images(tmp_path)
    assert on_images(tmp_path, run={"validation_domain": "photo"}).settings_hash() != plain.settings_hash()


@pytest.mark.parametrize(
    ("dataset", "domain"), [("digits", "rot0"), ("digit-masks", "shaded"), ("rotated-mnist", "M0")]
)
def test_domains_that_share_images_select_nothing(dataset, domain):
    """A held-out domain of digits would be the unseen domain's own images, and one of Rotated MNIST the clients'."""
    with pytest.raises(UserError, match=r"run\.validation_domain: the domains of .* show the same images") as error:
        complete(Experiment(data={"dataset": dataset}, run={"validation_domain": domain}))
    assert "\n" not in str(error.value)


def test_the_disjoint_domains_of_rotated_mnist_may_select():
    data = {"dataset": "rotated-mnist", "variant": "domainbed"}
    assert complete(Experiment(data=data, run={"validation_domain": "m0"})).run.validation_domain == "M0"


def test_a_share_for_adaptation_is_taken_from_the_unseen_domain_only(tmp_path, on_images):
    data = on_images(tmp_path, {"adapt_share": 0.5}, run={"validation_domain": "photo"}).data
    assert np.array_equal(load_target(data, "photo")[2], np.arange(24))
    assert len(load_target(data, "sketch")[2]) == 12
