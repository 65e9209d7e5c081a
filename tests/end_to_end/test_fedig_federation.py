"""FedIG and FedIG-A in a federation: what stays on the client, what is recorded, and every inference rule."""

import numpy as np
import pandas as pd
import pytest
import torch

from clients.local_steps import BestIterate
from fedsim.models.digits_cnn import DigitsCNN
from fedsim.run.plan import resolve
from fedsim.run.workspace import Workspace
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import Experiment
from strategies.banks.global_batch_norm import GlobalBatchNorm


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def arrays_of(net, names=None):
    state = net.state_dict()
    return {name: state[name].numpy().copy() for name in names or state}


def changed(net, before):
    return {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}


def snapshot(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


DATA = {"fraction": 0.06, "domains": ["rot0", "rot15", "rot30"], "holdout": 0.3}


def experiment(method="fedig-a", tmp_path="", train=None, run=None, **settings):
    return Experiment(
        data=DATA, method={"name": method, **settings},
        train={"rounds": 2, "batch_size": 16, "lr": 0.02, **(train or {})},
        run={"target": "rot30", "output": str(tmp_path), "threads": 1, **(run or {})})  # fmt: skip


@pytest.fixture
def client():
    return make_client(experiment())


def make_client(settings):
    space = Workspace(resolve(settings))
    client = space.client("rot0", "")
    client.records = {GlobalBatchNorm.name: arrays_of(space.net, space.initial)}
    return client


def fit(client, round, changes=None):
    state = {**arrays_of(client.net), **(changes or {})}
    config = {"round": round, "client": "rot0", "phase": "train"}
    return client.fit([state[name] for name in client.names("train")], config)


def test_personal_batch_norm_starts_from_the_server_and_then_stays(client):
    name = "backbone.norm1.bn.weight"
    averages = {key: value.copy() for key, value in client.records[GlobalBatchNorm.name].items()}
    averages[name] += 0.5
    client.records[GlobalBatchNorm.name] = averages
    assert name not in client.names("train")
    started = []
    original = client._load
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
    client = make_client(experiment(train={"iterations": 7, "local_checks": 3}))
    accuracies, states = iter([0.2, 0.6, 0.6]), []

    def validate(predict=None):
        states.append(snapshot(client.net))
        return next(accuracies), 0.0

    monkeypatch.setattr(client, "validate", validate)
    sent, *_ = fit(client, 1)
    for name, value in zip(client.upload_names(), sent, strict=True):
        assert torch.equal(torch.from_numpy(value), states[1][name])
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
    assert sorted(BestIterate(None, steps, checks).due - {0}) == due


def test_a_run_records_bytes_alpha_and_personal_accuracy(tmp_path):
    folder = launch(experiment(tmp_path=tmp_path, run={"personalised": True}))
    clients, details = pd.read_csv(folder / "clients.csv"), pd.read_csv(folder / "details.csv")
    side = 4 * 4 * sum(DigitsCNN.widths) + 2 * 8  # affine and statistics in float32, two counters
    assert set(clients["bytes_down_global_bn"]) == {side}
    # Trained on: all but the batch-norm side; validated on: all, as much as goes up.
    assert (clients["bytes_down_arrays"] == 2 * clients["bytes_up"] - side).all()
    assert (clients["bytes_down"] == clients["bytes_down_arrays"] + side).all()
    assert clients[["personal_accuracy", "personal_loss"]].notna().all().all()
    assert (clients["personal_loss"] != clients["validation_loss"]).any()
    alpha = details[details["quantity"] == "alpha"]
    assert set(alpha["name"]) == {"backbone.norm1", "backbone.norm2"}
    assert set(alpha["client"]) == {"rot30"}
    assert alpha["value"].between(0, 1).all()
    assert sorted(set(alpha["round"])) == [0, 1, 2]


def test_methods_without_a_personal_side_report_the_same(tmp_path):
    folder = launch(experiment("fedavg", tmp_path, run={"personalised": True}, train={"rounds": 1}))
    clients = pd.read_csv(folder / "clients.csv")
    assert (clients["personal_accuracy"] == clients["validation_accuracy"]).all()
    folder = launch(experiment("fedbn", tmp_path, train={"rounds": 1}))
    assert "personal_accuracy" not in pd.read_csv(folder / "clients.csv")


def test_server_average_of_the_batch_norm_side(tmp_path):
    """lambda1 = lambda2 = 0 is FedBN with averaged batch norm, number for number."""
    ours = launch(experiment("fedig", tmp_path, client_agnostic={"lambda1": 0.0, "lambda2": 0.0}))
    fedbn = launch(experiment("fedbn", tmp_path))
    columns = ["train_loss", "mean_validation_accuracy", "mean_validation_loss", "target_accuracy", "target_loss"]
    ours, fedbn = (pd.read_csv(folder / "rounds.csv")[columns] for folder in (ours, fedbn))
    pd.testing.assert_frame_equal(ours, fedbn)


def test_ensemble_of_uploads_survives_a_restart(tmp_path):
    from fedsim.run.checkpoint import load_checkpoint
    from fedsim.run.session import Session

    saved = []
    keep = Session._keep

    def watch(session, *args):
        keep(session, *args)
        saved.append(load_checkpoint(session.checkpoint_folder).state.banks)

    Session._keep = watch
    try:
        launch(experiment("fedig", tmp_path, infer="ensemble_of_local_bn"))
    finally:
        Session._keep = keep
    assert "own_batch_norm" not in saved[0]
    first, second = saved[1]["own_batch_norm"], saved[2]["own_batch_norm"]
    assert sorted(first) == ["rot0", "rot15"]
    assert len(first["rot0"]) == 8
    name = "backbone.norm1.bn.running_mean"
    assert not np.array_equal(first["rot0"][name], first["rot15"][name])
    assert not np.array_equal(first["rot0"][name], second["rot0"][name])


def test_every_rule_predicts_in_a_run(tmp_path):
    """A rule only changes the target's numbers; the validation that selects the round is the same."""
    found = {}
    for rule in ("eval_mode", "fixed_alpha", "tsmo_bn", "mix_norm"):
        folder = launch(experiment("fedig", tmp_path / rule, train={"rounds": 1, "iterations": 2}, infer=rule))
        found[rule] = pd.read_csv(folder / "rounds.csv").iloc[-1]
    assert len({row["mean_validation_loss"] for row in found.values()}) == 1
    assert len({row["target_loss"] for row in found.values()}) == 4
    assert pd.read_csv(folder / "summary.csv").shape[0] == 1


def test_same_seed_same_numbers(tmp_path):
    folders = [launch(experiment(tmp_path=tmp_path / name, train={"iterations": 3})) for name in ("a", "b")]
    rows = [pd.read_csv(folder / "rounds.csv") for folder in folders]
    timings = [column for column in rows[0] if column.endswith("seconds")]
    pd.testing.assert_frame_equal(*(frame.drop(columns=timings) for frame in rows))
