"""Test images of the sources, which neither train nor select: `data.source_test`."""

import numpy as np
import pandas as pd
import pytest
from image_trees import write_tree
from support import run_small, tiny_experiment

from fedsim.analysis import compare
from fedsim.commands.runs import headline
from fedsim.common.errors import UserError
from fedsim.data import load_client, load_pooled
from fedsim.records import read_runs
from fedsim.runs.plan import resolve
from fedsim.settings import DataSettings

COLUMN = "mean_source_test_accuracy"


def test_a_share_of_the_training_images_is_tested(tmp_path):
    """Of some 100 images a tenth validates as without a test; int(.2 n) of the n others are tested."""
    shares = {"fraction": 0.1, "source_test": 0.2, "split_seed": 0, "split": "random", "holdout": 0.1}
    data = tiny_experiment(tmp_path, data=shares).data
    plain = load_client(data.model_copy(update={"source_test": 0.0}), "rot0")
    client = load_client(data, "rot0")
    assert len(plain.test) == 0
    assert len(client.test) == int(0.2 * len(plain.train)) > 0
    assert np.array_equal(client.validation, plain.validation)
    assert sorted([*client.train, *client.test]) == sorted(plain.train)
    pooled = load_pooled(data, "rot45")
    counts = np.bincount(pooled.domain_index[pooled.test])
    assert counts.tolist() == [len(load_client(data, name).test) for name in pooled.domains]


def test_each_client_of_a_domain_tests_its_own(tmp_path):
    data = tiny_experiment(tmp_path, data={"source_test": 0.2, "clients_per_domain": 2, "fraction": 0.2}).data
    clients = [load_client(data, f"rot0/{number}") for number in (0, 1)]
    parts = [set(part) for client in clients for part in (client.train, client.validation, client.test)]
    assert all(parts)
    assert len(set.union(*parts)) == sum(map(len, parts))


@pytest.mark.parametrize("method", ["fedavg", "deepall"])
def test_a_run_records_it_and_selects_as_without(method, tmp_path):
    """A test of images that are gone from training changes the model, but no rule of selection reads its column."""
    experiment = tiny_experiment(tmp_path, method, rounds=3, data={"source_test": 0.3, "fraction": 0.1})
    folder, _ = run_small(experiment)
    rounds, clients = pd.read_csv(folder / "rounds.csv"), pd.read_csv(folder / "clients.csv")
    of_round = clients[clients["round"] == 2]["source_test_accuracy"]
    assert rounds[COLUMN].iloc[2] == pytest.approx(of_round.mean())
    summary = pd.read_csv(folder / "summary.csv").iloc[0]
    selected = rounds.set_index("round").loc[int(summary["best_validation_round"])]
    assert selected["mean_validation_accuracy"] == rounds["mean_validation_accuracy"].iloc[1:].max()
    assert summary[f"best_validation_{COLUMN}"] == pytest.approx(selected[COLUMN])
    assert f"{100 * selected[COLUMN]:.1f} % accuracy on test images of the sources" in headline(folder)
    compare(read_runs(tmp_path))


def test_there_are_no_columns_where_nobody_asks(tmp_path):
    folder, _ = run_small(tiny_experiment(tmp_path))
    for name in ("rounds", "clients", "summary"):
        assert "source_test" not in (folder / f"{name}.csv").read_text().splitlines()[0]
    assert "test images of the sources" not in headline(folder)


@pytest.fixture
def listed(tmp_path):
    """settings(test) of a domain of eight images, of which four train, two validate, and those of `test` are listed."""
    root = write_tree(tmp_path / "tree", ("art", "photo"), ("cat", "dog"), 4)
    names = sorted(str(path.relative_to(root)) for path in (root / "photo").rglob("*.*"))
    lists = tmp_path / "lists"
    lists.mkdir()
    for part, chosen in (("train", names[:4]), ("val", names[4:6])):
        (lists / f"photo_{part}.txt").write_text("\n".join(chosen))

    def settings(*test):
        (lists / "photo_test.txt").write_text("\n".join(names[place] for place in test))
        return DataSettings(
            dataset="folder", root=str(root), image_size=28, split="lists", lists="../lists", source_test="list",
            cache=str(tmp_path / "cache"),
        )  # fmt: skip

    return settings


def test_published_test_lists_are_read(listed):
    client = load_client(listed(6, 7), "photo")
    assert [len(part) for part in (client.train, client.validation, client.test)] == [4, 2, 2]
    with pytest.raises(UserError, match="photo: 1 images or groups of the test list train or validate"):
        load_client(listed(0, 7), "photo")


@pytest.mark.parametrize(("data", "words"), [
    ({"source_test": "list"}, "data.source_test = 'list' needs data.split = 'lists'"),
    ({"source_test": 0.2, "clients": 4}, "data.source_test takes images from a domain's own clients"),
    ({"source_test": 1.0}, "data.source_test: Input should be less than 1"),
    ({"source_test": "some"}, "data.source_test: Input should be a valid number, or Input should be 'list'"),
])  # fmt: skip
def test_what_cannot_be_is_refused(data, words, tmp_path):
    with pytest.raises(UserError, match=words):
        resolve(tiny_experiment(tmp_path, data=data))
