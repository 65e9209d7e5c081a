"""The attackers of a simulation (`run.attackers`): their formulas by hand, what they do to a run, what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from support import interrupt, numbers, run_small, tiny_experiment
from torch import tensor

from clients.local_data import shifted_labels
from fedsim.analysis import compare
from fedsim.common.errors import UserError
from fedsim.records import read_runs
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import Workspace
from fedsim.settings.attackers import liars_text, parse_attack
from fedsim.settings.experiment import Experiment, read_experiment
from strategies.attacks import alie_factor, attack
from strategies.server_round import Update

START = {"w": np.array([1.0, 1.0], np.float32), "buffer": np.array([5.0], np.float32)}
MOVES = {"a": (1, 0), "b": (3, 2), "liar": (2, -1)}  # deltas of three clients


def server_with(text, clients=tuple(MOVES)):
    """As much of a server as attacks read: `liar` attacks by `text`."""
    run = SimpleNamespace(attackers={"liar": text}, seed=0)
    parts = SimpleNamespace(start=START, model=SimpleNamespace(parameters=frozenset({"w"})))
    exchange = SimpleNamespace(notes=SimpleNamespace(round=1), clients=clients)
    return SimpleNamespace(experiment=SimpleNamespace(run=run), parts=parts, exchange=exchange)


def sent(text, round=1, **moves):
    """(the move that the liar sends, its buffer)."""
    updates = {}
    for client, move in {**MOVES, **moves}.items():
        arrays = {"w": START["w"] + np.array(move, np.float32), "buffer": START["buffer"] + len(updates)}
        updates[client] = Update(client, 10, arrays)
    server = server_with(text)
    server.exchange.notes.round = round
    lies = attack(server, updates)
    assert list(lies) == ["liar"]
    return (lies["liar"]["w"] - START["w"]).tolist(), lies["liar"]["buffer"].item()


@pytest.mark.parametrize(
    ("text", "move", "buffer"),
    [
        ("sign_flip", [-2, 1], 7),
        ("sign_flip(3)", [-6, 3], 7),
        ("scaled(4)", [8, -4], 7),
        ("noise(0)", [0, 0], 7),
        ("alie(1)", [1, 0], 7),  # mean of the honest (2, 1), std (1, 1)
        ("alie(0)", [2, 1], 7),
        ("mimic", [1, 0], 5),
        ("mimic(b)", [3, 2], 6),
    ],
)
def test_moves_by_hand(text, move, buffer):
    """Deltas (1, 0) and (3, 2) are honest, the liar's is (2, -1); buffers stay, except those of a copied client."""
    assert sent(text) == (move, buffer)


def test_a_drift_is_of_the_honest_clients_size_and_keeps_its_direction():
    """Honest sizes 1 and sqrt(13), whose median is their mean 2.3027756377."""
    first, _ = sent("drift(2)")
    second, _ = sent("drift(1)", round=7)
    assert np.linalg.norm(first) == pytest.approx(2 * 2.3027756377, rel=1e-5)
    assert np.allclose(first, 2 * np.array(second), rtol=1e-5)


def test_noise_is_that_of_the_round():
    assert sent("noise(1)") == sent("noise(1)")
    assert sent("noise(1)") != sent("noise(1)", round=2)


@pytest.mark.parametrize(("n", "m", "z"), [(10, 3, 0.1800123698), (20, 4, 0.1573106846), (4, 1, -0.4307272993)])
def test_the_factor_of_alie(n, m, z):
    """s = floor(n / 2 + 1) - m: with 4 clients and a liar a third of the honest ones is below, which is no attack."""
    assert alie_factor(n, m) == pytest.approx(z, abs=1e-9)


def test_labels_by_hand(tmp_path):
    """Of ten classes 3 becomes 6; of a batch of 5 and a share of 1/2 the first two are shifted, and 9 becomes 0."""
    assert shifted_labels(tensor([9, 3, 9, 3, 0]), 0.5, 10).tolist() == [0, 4, 9, 3, 0]
    assert shifted_labels(tensor([9, 3]), 1.0, 10).tolist() == [0, 4]

    def labels(attackers):
        data = Workspace(resolve(tiny_experiment(tmp_path, run={"attackers": attackers}))).client("rot15", "").data
        return data.labels[: data.examples].numpy(), data.labels[data.validation].numpy(), data.shifted

    honest, validation, shifted = labels({})
    flipped, of_validation, _ = labels({"rot15": "label_flip"})
    assert (flipped == 9 - honest).all()
    assert (of_validation == validation).all()
    assert shifted == 0.0
    assert labels({"rot15": "label_shift(0.5)"})[2] == 0.5


def attacked_run(folder, text, method="fedavg", **run):
    return tiny_experiment(folder, method, rounds=3, run={"attackers": {"rot15": text}, **run}, train={"lr": 0.1})


@pytest.mark.parametrize("text", ["label_flip", "label_shift(0.5)", "sign_flip", "alie(1)", "noise(0.01)", "drift"])
def test_a_liar_changes_the_run_alike_on_one_process_and_two(text, tmp_path):
    plain, _ = run_small(tiny_experiment(tmp_path / "plain", rounds=3, train={"lr": 0.1}))
    one, _ = run_small(attacked_run(tmp_path / "one", text))
    from fedsim.runtime.launch import launch

    two = launch(attacked_run(tmp_path / "two", text, processes=2))
    models = [load_file(folder / "last.safetensors") for folder in (plain, one, two)]
    assert any((models[0][name] != models[1][name]).any() for name in models[0])
    assert all((models[1][name] == models[2][name]).all() for name in models[1])
    assert numbers(one / "rounds.csv").equals(numbers(two / "rounds.csv"))
    assert json.loads((one / "environment.json").read_text())["attackers"] == {"rot15": text}


def test_a_killed_run_with_a_liar_ends_as_the_unbroken_one(tmp_path):
    whole, _ = run_small(attacked_run(tmp_path / "whole", "drift"))
    interrupt(attacked_run(tmp_path / "killed", "drift"), 2)
    folder, _ = run_small(attacked_run(tmp_path / "killed", "drift"))
    assert numbers(folder / "rounds.csv").equals(numbers(whole / "rounds.csv"))


def test_an_update_that_is_scaled_beyond_the_limit_is_refused(tmp_path):
    """`run.update_limit` sees what the liar sends."""
    experiment = attacked_run(tmp_path, "scaled(1000)", on_client_failure="continue")
    folder, _ = run_small(experiment)
    clients = pd.read_csv(folder / "clients.csv").query("round == 1").set_index("client")["status"]
    assert "reply refused" in clients["rot15"]
    assert (clients.drop("rot15") == "ok").all()


def test_every_table_says_that_a_client_lies(tmp_path):
    run_small(attacked_run(tmp_path, "sign_flip"))
    comparison = compare(read_runs(tmp_path))
    assert "with one liar (rot15: sign_flip)" in comparison.title
    assert "with one liar" in comparison.rule
    run_small(tiny_experiment(tmp_path / "honest", rounds=3, train={"lr": 0.1}))
    with pytest.raises(UserError, match=r"run\.attackers\.rot15"):
        compare(read_runs(tmp_path))
    assert liars_text([{}, {"a": "noise"}]) == "with different liars"
    assert liars_text([{}]) == ""


@pytest.mark.parametrize(
    ("attackers", "reason"),
    [
        ({"rot15": "sign_flop"}, "did you mean 'sign_flip'"),
        ({"rot15": "noise(x)"}, "write a number"),
        ({"rot15": "label_flip(2)"}, "has no option"),
        ({"rot15": "label_shift(2)"}, "from 0 to 1"),
        ({"rot15": "sign_flip", "rot15/1": "none"}, "'rot15/1' cannot be honest where all clients of 'rot15' lie"),
        ({"rot45": "sign_flip"}, "which does not train here"),
        ({"rot15": "mimic(rot45)"}, "no honest client"),
        ({"rot0": "noise", "rot15": "noise", "rot30": "noise"}, "every client lies"),
    ],
)
def test_bad_attackers_are_one_line(attackers, reason, tmp_path):
    with pytest.raises((UserError, ValueError), match=reason):
        resolve(tiny_experiment(tmp_path, run={"attackers": attackers}))


def test_what_attackers_cannot_attack_is_refused(tmp_path):
    with pytest.raises(UserError, match="secure_mean has masked it"):
        resolve(
            tiny_experiment(
                tmp_path,
                {"name": "fedavg", "fuse": "secure_mean"},
                run={"update_limit": 0.0, "attackers": {"rot15": "noise"}},
            )
        )
    with pytest.raises(UserError, match="nobody makes a real site lie"):
        resolve(tiny_experiment(tmp_path, run={"attackers": {"rot15": "noise"}, "runtime": "deployment"}))


def test_honest_settings_are_those_of_before():
    usual = Experiment()
    none = read_experiment("digits", ["run.attackers.rot15=none"])
    assert none.run.attackers == {}
    assert none.settings_hash() == read_experiment("digits").settings_hash()
    assert usual.replace(run={"attackers": {"rot15": "noise"}}).settings_hash() != usual.settings_hash()
    assert parse_attack("alie").number is None
