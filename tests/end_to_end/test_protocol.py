"""Whole runs: no client reads the target, and what stays on a client stays there."""

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support import numbers, run_small, small_experiment

import fedsim.runs.target
from clients.local_steps import BestIterate
from fedsim.common.seeding import numpy_rng
from fedsim.data import loading
from fedsim.records import select
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import Workspace, close_workspaces
from strategies.banks.global_batch_norm import GlobalBatchNorm

SHORT = {"rounds": 2, "iterations": 2}


def short(folder, method="fedavg", *, train=None, **sections):
    return run_small(small_experiment(folder, method, train={**SHORT, **(train or {})}, **sections))


@pytest.mark.parametrize("method", ["deepall", "csac"])
def test_no_client_opens_the_target(method, tmp_path, monkeypatch):
    """Only the server's evaluation reads the unseen domain; without this evaluation the same round is selected."""
    opened, original = [], loading.reader

    def watched(*words):
        read = original(*words)
        images = read.images
        read.images = lambda domain, *more: opened.append(domain) or images(domain, *more)
        return read

    def evaluated(*words):
        return opened.append("evaluation") or loading.load_target(*words)

    monkeypatch.setattr(loading, "reader", watched)
    monkeypatch.setattr(fedsim.runs.target, "load_target", evaluated)
    close_workspaces()
    folder, _ = short(tmp_path, method)
    place = opened.index("evaluation")
    assert opened[place + 1] == "rot45"
    del opened[place : place + 2]
    assert set(opened) == {"rot0", "rot15", "rot30"}
    rounds = pd.read_csv(folder / "rounds.csv")
    blind = rounds.assign(target_accuracy=np.nan, target_loss=np.nan)
    assert select(rounds, "best_validation")["round"] == select(blind, "best_validation")["round"]


def test_deepall_on_one_domain_is_fedavg_with_one_client(tmp_path, monkeypatch):
    """The same model, bit for bit, once both draw the same batches. Their streams have other names."""

    unnamed = lambda seed, purpose, client, *rest: numpy_rng(seed, purpose, *rest)  # noqa: E731
    monkeypatch.setattr("clients.local_round.numpy_rng", unnamed)
    data = {"domains": ["rot0", "rot45"]}
    single, pooled = (short(tmp_path / method, method, data=data)[0] for method in ("fedavg", "deepall"))
    a, b = numbers(single / "clients.csv"), numbers(pooled / "clients.csv")
    for column in ("examples", "validation_examples", "train_loss", "validation_loss"):
        assert list(a[column].dropna()) == list(b[column].dropna())
    np.testing.assert_equal(*(load_file(folder / "last.safetensors") for folder in (single, pooled)))


# FedIG-A: personal batch norm that starts from the server's average, and an adapter


def snapshot(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def make_client(**train):
    torch.manual_seed(0)
    space = Workspace(resolve(small_experiment("", "fedig-a", train={"batch_size": 16, **train})))
    client = space.client("rot0", "")
    client.records = {GlobalBatchNorm.name: {name: snapshot(space.net)[name].numpy() for name in space.initial}}
    return client


def fit(client, round, changes=None):
    state = {**{name: value.numpy() for name, value in snapshot(client.net).items()}, **(changes or {})}
    config = {"round": round, "client": "rot0", "phase": "train"}
    return client.fit([state[name] for name in client.names("train")], config)


def test_personal_batch_norm_starts_from_the_server_and_then_stays():
    client, name = make_client(), "backbone.norm1.bn.weight"
    averages = {key: value.copy() for key, value in client.records[GlobalBatchNorm.name].items()}
    averages[name] += 0.5
    client.records[GlobalBatchNorm.name] = averages
    assert name not in client.names("train")
    started, original = [], client._load
    client._load = lambda *args: (original(*args), started.append(client.net.state_dict()[name].clone()))[0]
    sent, _, metrics = fit(client, 4)  # drawn late, as with 10 of 30 clients a round
    torch.testing.assert_close(started[0], torch.from_numpy(averages[name]))
    uploaded = dict(zip(client.upload_names(), sent, strict=True))[name]
    averages[name] = averages[name] + 1
    client.net.load_state_dict({key: value * 0 for key, value in client.net.state_dict().items()})  # another client's
    fit(client, 5, {"head.bias": np.zeros(10, np.float32)})
    torch.testing.assert_close(started[1], torch.from_numpy(uploaded))
    torch.testing.assert_close(client.net.backbone.norm1.global_weight, torch.from_numpy(averages[name]))
    assert {"ce_loss", "cacl_loss", "cafl_loss", "adapter_loss"} <= metrics.keys()


def test_best_iterate_is_whole(monkeypatch):
    """The second of three validations is the best: weights, statistics and adapters of that step are sent and kept."""
    client = make_client(iterations=7, local_checks=3)
    accuracies, states = iter([0.2, 0.6, 0.6]), []

    def validate(predict=None):
        states.append(snapshot(client.net))
        return next(accuracies), 0.0

    monkeypatch.setattr(client, "validate", validate)
    sent, *_ = fit(client, 1)
    uploaded = {key: states[1][key].numpy() for key in client.upload_names()}
    np.testing.assert_equal(dict(zip(client.upload_names(), sent, strict=True)), uploaded)
    name = "backbone.norm1.adapter.fc2.bias"
    assert not torch.equal(states[1][name], states[2][name])
    client.store.open_round(2)
    personal = client.store.get("personal")
    assert all(torch.equal(value, states[1][name]) for name, value in personal.items())
    assert int(personal["backbone.norm1.bn.num_batches_tracked"]) == 4


@pytest.mark.parametrize(("steps", "checks", "due"), [
    (200, 10, list(range(20, 201, 20))), (7, 3, [2, 4, 7]), (19, 10, [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]),
    (3, 10, [1, 2, 3]), (5, 0, []),
])  # fmt: skip
def test_when_checks_are_due(steps, checks, due):
    assert sorted(BestIterate(None, None, steps, checks).due - {0}) == due
