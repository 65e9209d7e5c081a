"""FedCCRL's bank, on its own and in whole runs: anew in every round, failures, neutral settings."""

import numpy as np
import pytest
from support import numbers, run_small, small_experiment
from tampering import short, tamper

from fedsim.methods.assembly import build_recipe
from fedsim.tensors.arrays import record_to_arrays
from strategies.banks.pixel_statistics import PixelStatistics
from strategies.parts import ServerRound

BANK, ROUND = PixelStatistics(), ServerRound(1, 3, ["b", "a", "c"], {}, class_counts={"a": (3, 2), "b": (40,)})
SMALL = {"name": "fedccrl", "aligned_views": {"width": 1}}


def rows(count, value=0.5, channels=3):
    shape = (count, channels)
    return {"mean": np.full(shape, value, np.float32), "std": np.full(shape, value / 2, np.float32)}


def test_own_rows_are_never_handed_back():
    """The others' come joined in the order of the domains; without rows of others the record is empty."""
    bank = {"a": rows(2, 0.25), "b": rows(1, 0.5), "c": rows(0)}
    handed = {client: BANK.hand_out(bank, client, ROUND) for client in "abc"}
    assert {client: own["mean"][:, 0].tolist() for client, own in handed.items()} == {
        "a": [0.5], "b": [0.25, 0.25], "c": [0.5, 0.25, 0.25]}  # fmt: skip
    assert handed["b"]["std"][:, 0].tolist() == [0.125, 0.125]
    assert BANK.hand_out({"a": rows(3), "b": rows(0)}, "a", ROUND) == BANK.hand_out({}, "a", ROUND) == {}


GOOD = rows(5)


@pytest.mark.parametrize(("arrays", "reason"), [
    (GOOD, ""),
    (rows(0), ""),
    ({"mean": GOOD["mean"]}, "it holds ['mean']"),
    (GOOD | {"mean": np.zeros((5, 3))}, "expected float32 with 2 dimensions"),
    (GOOD | {"std": np.full((5, 3), np.nan, np.float32)}, "NaN"),
    (GOOD | {"std": GOOD["std"][:4]}, "the same images"),
    (rows(5, channels=0), "and channels"),
    (GOOD | {"mean": np.full((5, 3), 1.1, np.float32)}, "that no image"),
    (GOOD | {"std": np.zeros((5, 3), np.float32)}, "or a standard deviation"),
    (GOOD | {"std": 2 + GOOD["std"]}, "standard deviation that no image"),
    (rows(6), "6 rows, for 5 images"),
])  # fmt: skip
def test_contributions_are_checked(arrays, reason):
    found = BANK.accept("a", arrays, ROUND)
    assert reason in found
    assert bool(found) == bool(reason)


def test_records_are_compared_by_their_mean_row():
    assert BANK.compared(rows(4))["mean"].tolist() == [0.5] * 3
    assert BANK.compared(rows(0))["mean"].size == 0


def means_of(record):
    return record_to_arrays(record).get("mean", np.zeros((0, 1), np.float32))


def test_rows_anew_in_every_round_and_those_of_a_client_that_fails_stay(tmp_path):
    """In round 2 the rows of rot15 are lost: it does not train, and the others get its rows of round 1."""
    failing = tamper(lambda content: content["pixel_stats"].clear(), "collect")
    anew = {**SMALL, "pixel_statistics": {"refresh": "round"}}
    _, grid = run_small(short(tmp_path, 2, anew), tamper=failing)
    found, handed = {}, {}
    for message, reply in grid.seen:
        config, kind = message.content["config"], message.metadata.message_type
        if kind == "query.collect":
            assert "arrays" not in message.content.array_records
            found[config["round"], config["client"]] = means_of(reply.content["pixel_stats"])
        elif kind == "train":
            handed[config["round"], config["client"]] = means_of(message.content["pixel_stats"])
    assert not any(np.array_equal(found[1, client], found[2, client]) for client in ("rot0", "rot30"))
    assert len(found[1, "rot15"]) == 8
    assert handed.keys() == found.keys() - {(2, "rot15")}
    assert np.array_equal(handed[1, "rot15"], np.concatenate([found[1, "rot0"], found[1, "rot30"]]))
    assert np.array_equal(handed[2, "rot0"], np.concatenate([found[1, "rot15"], found[2, "rot30"]]))


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_without_other_colours_no_rows_are_collected(variant, tmp_path):
    """With p = 0 the views are AugMix's alone, in both variants (rows of the released code come in every round)."""
    method = {"name": "fedccrl", "aligned_views": {"p": 0.0, "variant": variant}}
    recipe = build_recipe(short(tmp_path, 1, method))
    assert recipe.disclosure() == "model updates"
    assert not recipe.banks[0].shared


@pytest.mark.parametrize(("method", "data", "said"), [
    ({"name": "fedccrl", "aligned_views": {"p": 0.0, "variant": "official"}}, {}, False),
    (SMALL, {"domains": ["rot0", "rot45"]}, True),
    (SMALL, {"fraction": 0.01}, True),  # too few images for one row
])  # fmt: skip
def test_a_federation_without_rows_of_others_trains(method, data, said, tmp_path, caplog):
    train = {"rounds": 1, "iterations": 1, "batch_size": 4}
    folder, _ = run_small(small_experiment(tmp_path, method, data=data, train=train))
    assert set(numbers(folder / "clients.csv")["status"]) == {"ok"}
    assert np.isfinite(numbers(folder / "rounds.csv")["train_loss"].iloc[1:]).all()
    assert ("no statistics of other clients' images" in caplog.text) == said


def test_no_views_are_fedavg(tmp_path):
    methods = ("fedavg", {"name": "fedccrl", "aligned_views": {"views": 0}})
    folders = [run_small(short(tmp_path / str(place), 1, method))[0] for place, method in enumerate(methods)]
    assert len({(folder / "last.safetensors").read_bytes() for folder in folders}) == 1
