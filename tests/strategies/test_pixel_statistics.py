"""FedCCRL's bank, on its own and in whole runs: once, anew in every round, failures, neutral settings."""

import numpy as np
import pytest
from support import numbers, run_small, small_experiment
from tampering import short, tamper

from fedsim.methods.assembly import build_recipe
from fedsim.tensors.arrays import record_to_arrays
from strategies.banks.pixel_statistics import PixelStatistics
from strategies.parts import ServerRound

ROUND = ServerRound(1, 3, ["b", "a", "c"], {}, class_counts={"a": (3, 2), "b": (40,)})
SMALL = {"name": "fedccrl", "aligned_views": {"width": 1}}
ANEW = {**SMALL, "pixel_statistics": {"refresh": "round"}}
SHORT = {"rounds": 2, "iterations": 1}


def rows(count, value=0.5, channels=3):
    shape = (count, channels)
    return {"mean": np.full(shape, value, np.float32), "std": np.full(shape, value / 2, np.float32)}


def test_t6_own_rows_are_never_handed_back():
    """The others' come joined in the order of the domains; without rows of others the record is empty."""
    bank = {"a": rows(2, 0.25), "b": rows(1, 0.5), "c": rows(0)}
    handed = {client: PixelStatistics().hand_out(bank, client, ROUND) for client in "abc"}
    assert handed["a"]["mean"][:, 0].tolist() == [0.5]
    assert handed["b"]["std"][:, 0].tolist() == [0.125, 0.125]
    assert handed["c"]["mean"][:, 0].tolist() == [0.5, 0.25, 0.25]
    assert PixelStatistics().hand_out({"a": rows(3), "b": rows(0)}, "a", ROUND) == {}
    assert PixelStatistics().hand_out({}, "a", ROUND) == {}


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
    found = PixelStatistics().accept("a", arrays, ROUND)
    assert reason in found
    assert bool(found) == bool(reason)


def test_records_are_compared_by_their_mean_row():
    assert PixelStatistics().compared(rows(4))["mean"].tolist() == [0.5] * 3
    assert PixelStatistics().compared(rows(0))["mean"].size == 0


def collected(grid):
    """{round: {client: rows}} of all contributions; the questions carry no model."""
    found = {}
    for message, reply in grid.seen:
        config = message.content.config_records["config"]
        if message.metadata.message_type == "query.collect" and len(reply.content.array_records["pixel_stats"]):
            assert "arrays" not in message.content.array_records
            own = record_to_arrays(reply.content.array_records["pixel_stats"])["mean"]
            found.setdefault(config["round"], {})[config["client"]] = own
    return found


def handed(grid):
    """{(round, client): rows} of all train messages with a record; no rows where it is empty."""
    found = {}
    for message, _ in grid.seen:
        if message.metadata.message_type == "train" and "pixel_stats" in message.content.array_records:
            config = message.content.config_records["config"]
            record = record_to_arrays(message.content.array_records["pixel_stats"])
            found[config["round"], config["client"]] = record.get("mean", ())
    return found


def test_rows_come_once_or_anew_in_every_round(tmp_path):
    """80 images give 8 rows of 8 bytes."""
    _, grid = run_small(short(tmp_path / "once", 2, SMALL))
    assert list(collected(grid)) == [0]
    assert set(handed(grid)) == {(1, client) for client in ("rot0", "rot15", "rot30")}
    folder, grid = run_small(short(tmp_path / "round", 2, ANEW))
    found = collected(grid)
    assert list(found) == [1, 2]
    assert not any(np.array_equal(found[1][client], found[2][client]) for client in found[1])
    for number in (1, 2):
        others = np.concatenate([found[number]["rot0"], found[number]["rot30"]])
        assert np.array_equal(handed(grid)[number, "rot15"], others)
    trained = numbers(folder / "clients.csv").query("round > 0")
    assert set(trained["bytes_up_pixel_stats"]) == {64}
    assert set(trained["bytes_down_pixel_stats"]) == {128}


def test_rows_of_a_client_that_fails_or_is_not_drawn_stay(tmp_path):
    failing = tamper(lambda content: content["pixel_stats"].clear(), "collect")
    _, grid = run_small(short(tmp_path / "on", 2, ANEW), tamper=failing)
    found = collected(grid)
    assert "rot15" not in found[2]
    assert np.array_equal(handed(grid)[2, "rot0"], np.concatenate([found[1]["rot15"], found[2]["rot30"]]))
    assert (2, "rot15") not in handed(grid)
    drawn = {**SHORT, "rounds": 3, "clients_per_round": 1}
    _, grid = run_small(small_experiment(tmp_path / "drawn", ANEW, train=drawn))
    newest, found = {}, collected(grid)
    for (number, client), received in handed(grid).items():
        assert list(found[number]) == [client]
        newest[client] = found[number][client]
        others = [newest[name] for name in ("rot0", "rot15", "rot30") if name in newest and name != client]
        assert np.array_equal(received, np.concatenate(others) if others else ())
    assert len(newest) > 1


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_without_other_colours_no_rows_are_collected(variant, tmp_path):
    """With p = 0 the views are AugMix's alone, in both variants (rows of the released code come in every round)."""
    method = {"name": "fedccrl", "aligned_views": {"p": 0.0, "variant": variant}}
    recipe = build_recipe(short(tmp_path, 1, method))
    assert recipe.disclosure() == "model updates"
    assert not recipe.banks[0].shared


def test_views_without_rows_train_and_no_views_are_fedavg(tmp_path, caplog):
    views = {"p0": {"p": 0.0, "variant": "official"}, "none": {"views": 0}}
    methods = {key: {"name": "fedccrl", "aligned_views": own} for key, own in views.items()}
    runs = {key: run_small(short(tmp_path / key, 1, method))[0] for key, method in methods.items()}
    runs["plain"], _ = run_small(short(tmp_path / "plain", 1))
    for key in views:
        clients = numbers(runs[key] / "clients.csv")
        assert not [name for name in clients if name.endswith("pixel_stats")]
        assert set(clients["status"]) == {"ok"}
    assert "no statistics of other clients' images" not in caplog.text
    last = {key: (folder / "last.safetensors").read_bytes() for key, folder in runs.items()}
    assert last["none"] == last["plain"] != last["p0"]


@pytest.mark.parametrize("data", [{"domains": ["rot0", "rot45"]}, {"fraction": 0.01}])
def test_t9_a_federation_without_rows_of_others_trains(data, tmp_path, caplog):
    """A single client, and clients with too few images for one row."""
    experiment = small_experiment(tmp_path, SMALL, data=data, train={**SHORT, "rounds": 1, "batch_size": 4})
    folder, _ = run_small(experiment)
    assert set(numbers(folder / "clients.csv")["status"]) == {"ok"}
    assert np.isfinite(numbers(folder / "rounds.csv")["train_loss"].iloc[1:]).all()
    assert "no statistics of other clients' images" in caplog.text
