"""CSAC's client as a part: its properties and ablations, what the server records, and the gap of FedDG-GA."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_round import changed, snapshot
from support import numbers, run_small, small_experiment, tiny_experiment

from clients.optimizers import make_optimizer
from clients.parts import Batch
from clients.reports.generalization_gap import GeneralizationGap
from clients.step.calibration import ACQUIRED
from clients.terms.moon import PREVIOUS
from fedsim.results import read_runs
from fedsim.run.plan import resolve
from fedsim.run.workspace import Workspace

ROUND = {"round": 1, "phase": "train", "client": "rot0"}


def client_after_stage_a(tmp_path, method="csac", add=(), **fields):
    table = {"name": method, "add": list(add), "semantic_calibration": fields}
    client = Workspace(resolve(small_experiment(tmp_path, table, model={"bottleneck": 8}))).client("rot0", "")
    client.store.open_round(0)
    client._train(client._open({"round": 0, "phase": "acquire", "client": "rot0"}))
    client.store.commit()
    client.store.open_round(1)
    return client


def test_alignment_alone_leaves_bottleneck_and_head_alone(tmp_path):
    """L_AL has gradients in the backbone up to its levels, and none in the bottleneck and the classifier."""
    client = client_after_stage_a(tmp_path, cross_entropy=False)
    round = client._open(ROUND)
    with torch.no_grad():  # the model must differ from L^h, otherwise there is nothing to align
        for parameter in client.net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    round.optimizer = make_optimizer(client.net, round.train, 0.0)
    batch = client.data.batch(np.arange(16))
    client.recipe.client.begin(round)(Batch(batch.images, batch.labels))
    gradients = {name: parameter.grad for name, parameter in client.net.named_parameters()}
    assert all(gradients[name] is None for name in gradients if name.startswith(("bottleneck", "head", "backbone.fc")))
    assert gradients["backbone.conv1.weight"].abs().sum() > 0


def test_local_model_is_frozen(tmp_path):
    """Parameters and running statistics of L^h are bitwise equal before and after calibration."""
    client = client_after_stage_a(tmp_path)
    round, before = client._open(ROUND), client.store.get(ACQUIRED)
    client._train(round)
    local = round.scratch[ACQUIRED]
    assert not any(client.state[name].equal(value) for name, value in before.items())
    assert all(value.equal(before[name]) for name, value in local.state_dict().items())
    assert not any(parameter.requires_grad for parameter in local.parameters())


def test_terms_of_other_rows_wait_for_the_rounds(tmp_path):
    """Stage A is label-smoothed CE; of the terms, smoothed labels alone act in it."""
    terms = "model_contrast", "proximal", "guiding_head", "representation_norm", "self_reg"
    plain, joined, smoothed = (
        client_after_stage_a(tmp_path / str(len(add)), add=add) for add in ((), terms, ("label_smoothing",))
    )
    model = snapshot(plain.net)
    assert all(joined.state[name].equal(value) for name, value in model.items())
    assert joined.store.get(ACQUIRED) is not None
    assert joined.store.get(PREVIOUS) is None
    assert changed(smoothed.net, model)


def model_of(folder, **fields):
    method = {"name": "csac", "semantic_calibration": {"acquire_iterations": 3, **fields}}
    return load_file(run_small(tiny_experiment(folder, method, 1, train={"iterations": 2}))[0] / "last.safetensors")


@pytest.fixture(scope="module")
def standard(tmp_path_factory):
    return model_of(tmp_path_factory.mktemp("standard"))


@pytest.mark.parametrize("fields", [
    {"align": "same_layer"}, {"align": "logits"}, {"align": "none"}, {"attention": "position"},
    {"attention": "channel"}, {"attention": "uniform"}, {"distance": "mse"}, {"statistic": "v"}, {"proj": "pool1x1"},
    {"qk_conv": True}, {"freeze_proj": True}, {"smoothing": 0.0},
], ids=str)  # fmt: skip
def test_ablations_change_the_result(fields, standard, tmp_path):
    ablated = model_of(tmp_path, **fields)
    assert all(np.isfinite(value).all() for value in ablated.values())
    assert any(not np.array_equal(standard[name], ablated[name]) for name in standard)


def test_a_late_client_acquires_from_the_initial_model(tmp_path):
    """Without L^h it runs stage A first, from the initial model, and then calibrates the received one."""
    experiment = small_experiment(tmp_path, {"name": "csac"}, train={"rounds": 2, "lr": 1e-12})
    space = Workspace(resolve(experiment))
    client = space.client("rot0", "")
    initial = {name: value.clone() for name, value in space.plan.build_net().named_parameters()}
    received = {name: client.state[name].numpy() + 1 for name in client.names("train")}
    arrays, _, _ = client.fit(list(received.values()), {"round": 2, "phase": "train", "client": "rot0"})
    acquired, sent = client.store.get(ACQUIRED), dict(zip(client.upload_names(), arrays))
    assert acquired.keys() == client.net.state_dict().keys()
    for name, value in initial.items():
        assert torch.allclose(acquired[name], value, atol=1e-6)
        assert np.allclose(sent[name], received[name], atol=1e-6)


def test_divergence_weights_are_recorded(tmp_path):
    """Every coefficient is in details.csv, sums to one per tensor and round, and its mean is the client's weight."""
    folder, _ = run_small(tiny_experiment(tmp_path, "csac"))
    details = read_runs(folder).details.query("quantity == 'divergence_weight'")
    np.testing.assert_allclose(details.groupby(["round", "name"])["value"].sum(), 1.0, atol=1e-12)
    clients = numbers(folder / "clients.csv").dropna(subset=["weight"]).set_index(["round", "client"])
    means = details.groupby(["round", "client"])["value"].mean()
    np.testing.assert_allclose(clients["weight"].sort_index(), means.sort_index(), atol=1e-12)
    assert sorted(details["round"].unique()) == [0, 1, 2]


@pytest.mark.parametrize("metric", ["train_loss", "validation_loss"])
def test_gap_of_generalization_adjustment(metric, tmp_path, monkeypatch):
    """The gap is the received model's risk minus that of the client's own last model."""
    risks, original = [], GeneralizationGap._risk
    monkeypatch.setattr(GeneralizationGap, "_risk", lambda *words: risks.append(original(*words)) or risks[-1])
    method = {"name": "feddg-ga", "generalization_gap": {"metric": metric}}
    folder, _ = run_small(tiny_experiment(tmp_path, method))
    clients = numbers(folder / "clients.csv").set_index(["round", "client"])
    received = [risks[3 + 2 * index] for index in range(3)]
    np.testing.assert_allclose(clients.loc[2, "gap"], np.subtract(received, risks[:3]), rtol=1e-12)
    if metric == "validation_loss":  # that of the received model is what the clients had recorded
        np.testing.assert_allclose(clients.loc[1, "validation_loss"], received, rtol=1e-6)
    assert (clients.loc[1, "gap_valid"] == 0).all()
    np.testing.assert_allclose(clients.loc[1, "weight"], 1 / 3)
    assert clients.loc[2, "weight"].nunique() == 3


@pytest.mark.parametrize("fields", [{"metric": "validation_accuracy"}, {"max_samples": 20}])
def test_weights_of_other_gaps_sum_to_one(fields, tmp_path):
    folder, _ = run_small(tiny_experiment(tmp_path, {"name": "feddg-ga", "generalization_gap": fields}))
    weights = numbers(folder / "clients.csv").dropna(subset=["weight"]).groupby("round")["weight"]
    np.testing.assert_allclose(weights.sum(), 1.0)
