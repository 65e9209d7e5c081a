"""run.validation_domain: a domain on which no one trains selects the round; the kept model is that of this round."""

import numpy as np
import pandas as pd
import pytest
from image_trees import write_tree
from support import interrupt, run_small, small_experiment, tiny_experiment

from fedsim.analysis import compare
from fedsim.commands.runs import headline
from fedsim.common.errors import UserError
from fedsim.data import client_names, load_pooled, load_target
from fedsim.records import read_runs
from fedsim.records.differences import comparable_settings
from fedsim.runs import session
from fedsim.runs.checkpoint import link_file, unfinished, write_arrays
from fedsim.runs.kept_tensors import kept_entries, take_over_best
from fedsim.runs.origin import round_of
from fedsim.runs.plan import complete, resolve
from fedsim.settings.experiment import Experiment
from fedsim.studies import Axes
from fedsim.studies.plan import plan_cells

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


TIED = {1: 0.6, 2: 0.1 + 0.2 + 0.3, 3: 0.5}  # rounds 1 and 2 are equal in exact arithmetic


@pytest.fixture
def scores(monkeypatch):
    row_of, scores = session.round_row, {}

    def scored(log, *words):
        return row_of(log, *words) | {"mean_validation_accuracy": scores.get(log.round, 0.1)}

    monkeypatch.setattr(session, "round_row", scored)
    return scores


def check_kept(folder, best):
    assert pd.read_csv(folder / "summary.csv")["best_validation_round"][0] == best
    assert round_of(folder / "best.safetensors") == best


@pytest.mark.parametrize("stop", [None, 2])
def test_the_first_of_equal_rounds_is_kept(tmp_path, scores, stop):
    """Also by a run that is resumed from the later one of the equal rounds."""
    scores |= TIED
    experiment = tiny_experiment(tmp_path, rounds=3)
    if stop:
        interrupt(experiment, stop)
    folder, _ = run_small(experiment)
    check_kept(folder, 1)
    assert (folder / "predictions" / "round000001.safetensors").is_file()


@pytest.mark.parametrize(
    ("method", "first", "again", "best"),  # scores by round, of both attempts
    [("copa", {3: 0.9}, {}, 2), ("fedavg", {1: 0.9, 3: 0.95}, {}, 1), ("fedavg", {3: 0.9}, {3: 0.8}, 3)],
)
def test_a_model_of_an_interrupted_attempt_is_not_kept(tmp_path, scores, method, first, again, best):
    """Rounds after the last checkpoint are repeated, and may have other scores then: noise does not repeat."""
    experiment = tiny_experiment(tmp_path, method, 4, run={"checkpoint_every": 2})
    scores |= {2: 0.5} | first
    folder = interrupt(experiment, 3)
    assert round_of(folder / "best.safetensors") == (1 if 1 in first else 2)  # as round 2 was saved
    scores.clear()
    scores |= again
    run_small(experiment)
    check_kept(folder, best)
    assert bool(kept_entries(folder, "best")) == (method == "copa")  # its heads, of the same round


@pytest.mark.parametrize(("round", "taken"), [(4, True), (5, False)])
def test_a_best_model_waits_for_its_checkpoint(tmp_path, round, taken):
    """A run that was killed after checkpoint 4, before the move, has it after resuming."""
    for name in ("best.safetensors", "inference/best.safetensors"):
        write_arrays(tmp_path / "checkpoint" / name, {}, {"round": str(round)})
    take_over_best(tmp_path, tmp_path / "checkpoint", 4)
    take_over_best(tmp_path, tmp_path / "checkpoint", 4)  # nothing waits any more
    left = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.safetensors")}
    assert left == ({"best.safetensors", "inference/best.safetensors"} if taken else set())


@pytest.mark.parametrize("killed", [False, True])
def test_a_link_made_again_leaves_nothing_else(tmp_path, killed):
    saved, best = tmp_path / "arrays.safetensors", tmp_path / "best.safetensors"
    write_arrays(saved, {"w": np.arange(3.0)})
    for _ in range(2):
        if killed:
            unfinished(saved).write_bytes(b"cut")
            unfinished(best).write_bytes(b"cut")
            write_arrays(saved, {"w": np.zeros(2)})
        link_file(saved, best)
        assert {file.name for file in saved.parent.iterdir()} == {saved.name, best.name}
        assert best.read_bytes() == saved.read_bytes()
