"""FedCCRL's bank, on its own and in whole runs: once, anew in every round, failures, neutral settings, combinations."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from flwr.app import Error, Message
from support import Interrupt, numbers, run_small, small_experiment

from fedsim.common.errors import ClientFailedError
from fedsim.methods.assembly import build_recipe
from fedsim.run.workspace import close_workspaces
from fedsim.runtime.launch import launch
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


def test_contributions_are_checked():
    bank, good = PixelStatistics(), rows(5)
    assert (
        bank.accept("a", good, ROUND) == bank.accept("a", rows(0), ROUND) == bank.accept("unknown", good, ROUND) == ""
    )
    wrong = {
        "it holds ['mean']": {"mean": good["mean"]},
        "expected float32 with 2 dimensions": good | {"mean": np.zeros((5, 3))},
        "NaN": good | {"std": np.full((5, 3), np.nan, np.float32)},
        "the same images": good | {"std": good["std"][:4]},
        "and channels": rows(5, channels=0),
        "that no image": good | {"mean": np.full((5, 3), 1.1, np.float32)},
        "or a standard deviation": good | {"std": np.zeros((5, 3), np.float32)},
        "6 rows, for 5 images": rows(6),
    }
    for reason, arrays in wrong.items():
        assert reason in bank.accept("a", arrays, ROUND), reason
    assert "standard deviation that no image" in bank.accept("a", good | {"std": 2 + good["std"]}, ROUND)
    assert bank.compared(rows(4))["mean"].tolist() == [0.5] * 3
    assert bank.compared(rows(0))["mean"].size == 0


def collected(grid):
    """{round: {client: rows}} of all contributions, and whether the questions had a model."""
    found, models = {}, set()
    for message, reply in grid.seen:
        config = message.content.config_records["config"]
        if message.metadata.message_type == "query.collect" and not reply.has_error():
            models.add("arrays" in message.content.array_records)
            own = record_to_arrays(reply.content.array_records["pixel_stats"])["mean"]
            found.setdefault(config["round"], {})[config["client"]] = own
    return found, models


def handed(grid):
    """{(round, client): rows} of all train messages with a record; no rows where it is empty."""
    return {
        (config["round"], config["client"]): record_to_arrays(message.content.array_records["pixel_stats"]).get(
            "mean", ()
        )
        for message, _ in grid.seen
        if message.metadata.message_type == "train" and "pixel_stats" in message.content.array_records
        for config in [message.content.config_records["config"]]
    }


def test_rows_come_once_or_anew_in_every_round(tmp_path):
    """80 images give 8 rows of 8 bytes; the question of a round carries no model."""
    folder, grid = run_small(small_experiment(tmp_path / "once", SMALL, train=SHORT))
    found, models = collected(grid)
    assert (list(found), models) == ([0], {False})
    assert set(handed(grid)) == {(1, client) for client in ("rot0", "rot15", "rot30")}
    folder, grid = run_small(small_experiment(tmp_path / "round", ANEW, train=SHORT))
    found, models = collected(grid)
    assert (list(found), models) == ([1, 2], {False})
    assert not any(np.array_equal(found[1][client], found[2][client]) for client in found[1])
    for number in (1, 2):
        others = np.concatenate([found[number]["rot0"], found[number]["rot30"]])
        assert np.array_equal(handed(grid)[number, "rot15"], others)
    table = numbers(folder / "clients.csv")
    trained = table[table["round"] > 0]
    assert set(trained["bytes_up_pixel_stats"]) == {64}
    assert set(trained["bytes_down_pixel_stats"]) == {128}


def test_rows_of_a_client_that_fails_or_is_not_drawn_stay(tmp_path):
    def tamper(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        fails = (config["phase"], config.get("round"), config.get("client")) == ("collect", 2, "rot15")
        return Message(Error(2, "Traceback: no light"), reply_to=message) if fails else reply

    with pytest.raises(ClientFailedError, match="no light"):
        run_small(small_experiment(tmp_path / "stop", ANEW, train=SHORT), tamper=tamper)
    experiment = small_experiment(tmp_path / "on", ANEW, train=SHORT, run={"on_client_failure": "continue"})
    _, grid = run_small(experiment, tamper=tamper)
    found, _ = collected(grid)
    assert "rot15" not in found[2]
    assert np.array_equal(handed(grid)[2, "rot0"], np.concatenate([found[1]["rot15"], found[2]["rot30"]]))
    assert (2, "rot15") not in handed(grid)
    _, grid = run_small(
        small_experiment(tmp_path / "drawn", ANEW, train={**SHORT, "rounds": 3, "clients_per_round": 1})
    )
    newest = {}
    found, _ = collected(grid)
    for (number, client), received in handed(grid).items():
        assert list(found[number]) == [client]
        newest[client] = found[number][client]
        others = [newest[name] for name in ("rot0", "rot15", "rot30") if name in newest and name != client]
        assert np.array_equal(received, np.concatenate(others) if others else ())
    assert len(newest) > 1


def test_a_killed_run_and_two_processes_give_the_same_records(tmp_path):
    """Batch norm, AugMix's draws and a bank with new rows in every round are those of the unbroken run."""
    method, train = ANEW, {**SHORT, "iterations": 2}
    whole, _ = run_small(small_experiment(tmp_path / "whole", method, train=train))
    with pytest.raises(KeyboardInterrupt):
        run_small(small_experiment(tmp_path / "cut", method, train=train), Interrupt(1))
    close_workspaces()
    cut, _ = run_small(small_experiment(tmp_path / "cut", method, train=train))
    own = {"output": str(tmp_path / "two"), "processes": 2}
    two = launch(small_experiment(tmp_path, method, train=train, run=own))
    for other in (cut, two):
        for file in ("rounds.csv", "clients.csv"):
            pd.testing.assert_frame_equal(numbers(whole / file), numbers(other / file), rtol=0, atol=0)
        assert (whole / "last.safetensors").read_bytes() == (other / "last.safetensors").read_bytes()


def test_no_views_are_fedavg(tmp_path):
    """Bit for bit, and no rows are collected."""
    method = {"name": "fedccrl", "aligned_views": {"views": 0}}
    ours, _ = run_small(small_experiment(tmp_path / "a", method, train=SHORT))
    plain, _ = run_small(small_experiment(tmp_path / "b", train=SHORT))
    for table in ("rounds.csv", "clients.csv"):
        pd.testing.assert_frame_equal(numbers(ours / table), numbers(plain / table), rtol=0, atol=0)
    assert (ours / "last.safetensors").read_bytes() == (plain / "last.safetensors").read_bytes()


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_without_other_colours_no_rows_are_collected(variant, tmp_path, caplog):
    """With p = 0 the views are AugMix's alone, in both variants (rows of the released code come in every round)."""
    method = {"name": "fedccrl", "aligned_views": {"p": 0.0, "variant": variant}}
    folder, _ = run_small(small_experiment(tmp_path, method, train={**SHORT, "rounds": 1}))
    clients = numbers(folder / "clients.csv")
    assert not [name for name in clients if name.endswith("pixel_stats")]
    assert set(clients["status"]) == {"ok"}
    assert "no statistics of other clients' images" not in caplog.text
    recipe = build_recipe(small_experiment(tmp_path, method))
    assert recipe.disclosure() == "model updates"
    assert not recipe.banks[0].shared


@pytest.mark.parametrize("data", [{"domains": ["rot0", "rot45"]}, {"fraction": 0.01}])
def test_t9_a_federation_without_rows_of_others_trains(data, tmp_path, caplog):
    """A single client, and clients with too few images for one row."""
    experiment = small_experiment(tmp_path, SMALL, data=data, train={**SHORT, "batch_size": 4})
    folder, _ = run_small(experiment)
    assert set(numbers(folder / "clients.csv")["status"]) == {"ok"}
    assert np.isfinite(numbers(folder / "rounds.csv")["train_loss"].iloc[1:]).all()
    assert "no statistics of other clients' images" in caplog.text


@pytest.mark.parametrize("method", ["fedccrl+feddg-ga", "fedccrl+gperxan"])
def test_combinations_run(method, tmp_path: Path):
    folder, _ = run_small(small_experiment(tmp_path, {**SMALL, "name": method}, train=SHORT))
    assert np.isfinite(numbers(folder / "rounds.csv")["train_loss"].iloc[1:]).all()
    assert {"js_loss", "contrast_loss"} <= set(numbers(folder / "clients.csv"))
