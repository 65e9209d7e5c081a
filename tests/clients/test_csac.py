"""CSAC's client and fusion as parts: their properties, the ablations, and what the server records."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support import numbers, run_small, small_experiment

from clients.parts import Batch
from clients.step.calibration import ACQUIRED, SemanticCalibration
from clients.terms.moon import PREVIOUS
from fedsim.results import read_runs
from fedsim.run.plan import resolve
from fedsim.run.workspace import Workspace


def opened(tmp_path, **fields):
    """(a client that has acquired its local model, its round 1)."""
    method = {"name": "csac", "semantic_calibration": fields}
    experiment = small_experiment(tmp_path, method, model={"bottleneck": 8})
    client = Workspace(resolve(experiment)).client("rot0", "")
    client.store.open_round(0)
    acquire = client._open({"round": 0, "phase": "acquire", "client": "rot0"})
    client._train(acquire)
    client.store.commit()
    round = client._open({"round": 1, "phase": "train", "client": "rot0"})
    return client, round


def one_step(client, round):
    """Gradients by name after one calibration step with learning rate 0."""
    from clients.optimizers import make_optimizer

    round.optimizer = make_optimizer(client.net, round.train, 0.0)
    client.net.train()
    step = client.recipe.client.begin(round)
    batch = client.data.batch(np.arange(16))
    step(Batch(batch.images, batch.labels))
    return {name: parameter.grad for name, parameter in client.net.named_parameters()}


def test_alignment_alone_leaves_bottleneck_and_head_alone(tmp_path):
    """4.9.6: L_AL has gradients in the backbone up to its levels, and none in the bottleneck and the classifier."""
    client, round = opened(tmp_path, cross_entropy=False)
    with torch.no_grad():  # the model must differ from L^h, otherwise there is nothing to align
        for parameter in client.net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    gradients = one_step(client, round)
    assert all(gradients[name] is None for name in gradients if name.startswith(("bottleneck", "head", "backbone.fc")))
    assert gradients["backbone.conv1.weight"].abs().sum() > 0


def test_local_model_is_frozen(tmp_path):
    """4.9.6: parameters and running statistics of L^h are bitwise equal before and after calibration."""
    client, round = opened(tmp_path)
    before = client.store.get(ACQUIRED)
    client._train(round)
    local = round.scratch[ACQUIRED]
    assert not any(client.state[name].equal(value) for name, value in before.items())
    assert all(value.equal(before[name]) for name, value in local.state_dict().items())
    assert not any(parameter.requires_grad for parameter in local.parameters())


def test_lambda_zero_is_local_cross_entropy(tmp_path):
    """4.9.7: calibration with lambda 0 is local CE training from M, bit for bit."""
    client, _ = opened(tmp_path / "a", weight=0.0)
    plain = Workspace(resolve(small_experiment(tmp_path / "b", model={"bottleneck": 8}))).client("rot0", "")
    start = {name: value.clone() for name, value in client.net.state_dict().items()}
    models = []
    for trainer in (client, plain):
        opened_round = trainer._open({"round": 1, "phase": "train", "client": "rot0"})
        trainer.net.load_state_dict(start)
        trainer._train(opened_round)
        models.append({name: value.clone() for name, value in trainer.net.state_dict().items()})
    assert all(models[0][name].equal(models[1][name]) for name in start)


def acquired(tmp_path, method, *add):
    """(what the client has after stage A, the names of the entries that it keeps)."""
    experiment = small_experiment(tmp_path, {"name": method, "add": list(add)}, model={"bottleneck": 8})
    client = Workspace(resolve(experiment)).client("rot0", "")
    client.store.open_round(0)
    client._train(client._open({"round": 0, "phase": "acquire", "client": "rot0"}))
    client.store.commit()
    client.store.open_round(1)
    model = {name: value.clone() for name, value in client.state.items() if not name.startswith("projector")}
    kept = {entry for entry in (ACQUIRED, PREVIOUS) if client.store.get(entry) is not None}
    return model, kept


def test_terms_of_other_rows_wait_for_the_rounds(tmp_path):
    """Stage A is label-smoothed CE; of the terms, smoothed labels alone act in it."""
    plain, _ = acquired(tmp_path / "plain", "csac")
    terms = "model_contrast", "proximal", "guiding_head", "representation_norm", "self_reg"
    joined, kept = acquired(tmp_path / "joined", "csac", *terms)
    assert all(joined[name].equal(value) for name, value in plain.items())
    assert kept == {ACQUIRED}
    smoothed, _ = acquired(tmp_path / "smoothed", "csac", "label_smoothing")
    assert not all(smoothed[name].equal(value) for name, value in plain.items())


SHORT = {"acquire_iterations": 4}


@pytest.fixture(scope="module")
def standard(tmp_path_factory):
    """The last model of a short run of the paper's method."""
    method = {"name": "csac", "semantic_calibration": SHORT}
    folder, _ = run_small(small_experiment(tmp_path_factory.mktemp("standard"), method, train={"rounds": 1}))
    return load_file(folder / "last.safetensors")


@pytest.mark.parametrize(
    "fields",
    [
        {"align": "same_layer"},
        {"align": "logits"},
        {"align": "none"},
        {"attention": "position"},
        {"attention": "channel"},
        {"attention": "uniform"},
        {"distance": "mse"},
        {"statistic": "v"},
        {"proj": "pool1x1"},
        {"qk_conv": True},
        {"freeze_proj": True},
        {"smoothing": 0.0},
    ],
    ids=str,
)
def test_ablations_change_the_result(fields, standard, tmp_path):
    """Every ablation of the paper is a setting that changes the result; the result is finite."""
    method = {"name": "csac", "semantic_calibration": {**SHORT, **fields}}
    folder, _ = run_small(small_experiment(tmp_path, method, train={"rounds": 1}))
    ablated = load_file(folder / "last.safetensors")
    assert all(np.isfinite(value).all() for value in ablated.values())
    assert any(not np.array_equal(standard[name], ablated[name]) for name in standard)


@pytest.mark.parametrize("budget", ["images", "steps"])
def test_csac_without_its_parts_is_fedavg_under_every_budget(budget, tmp_path):
    """No acquisition, no alignment and an average of the models are FedAvg with uniform weights, bit for bit."""
    off = {"acquire_iterations": 0, "acquire_epochs": 0, "weight": 0.0}
    parts = {"semantic_calibration": off, "semantic_divergence": {"strategy": "average"}}
    models = []
    for method in ({"name": "csac", **parts}, {"name": "fedavg", "weights": "uniform"}):
        experiment = small_experiment(tmp_path / method["name"], method, train={"rounds": 2, "budget": budget})
        models.append(load_file(run_small(experiment)[0] / "last.safetensors"))
    assert all(np.array_equal(models[0][name], models[1][name]) for name in models[1])


def test_late_client_acquires_first(tmp_path):
    """A client that holds no L^h and is asked to calibrate runs stage A first, then calibrates the received model."""
    experiment = small_experiment(tmp_path, {"name": "csac", "semantic_calibration": {"acquire_iterations": 3}})
    client = Workspace(resolve(experiment)).client("rot0", "")
    state = {name: value.numpy().copy() for name, value in client.net.state_dict().items()}
    config = {"round": 2, "phase": "train", "client": "rot0"}
    client.fit([state[name] for name in client.names("train")], config)
    client.store.open_round(3)
    assert client.store.get(ACQUIRED).keys() == state.keys()


def test_stage_a_has_its_own_amount_of_work():
    """Stage A has 1,800 iterations by default and epochs when this is 0; its learning rate is constant."""
    part = SemanticCalibration()
    assert (part.acquire_iterations, part.weight, part.smoothing) == (1800, 0.6, 0.1)
    assert dataclasses.replace(part, acquire_iterations=0).acquire_epochs == 30


def test_divergence_weights_are_recorded(tmp_path):
    """Every coefficient is in details.csv, sums to one per tensor and round, and its mean is the client's weight."""
    folder, _ = run_small(small_experiment(tmp_path, "csac"))
    details = read_runs(folder).details
    details = details[details["quantity"] == "divergence_weight"]
    sums = details.groupby(["round", "name"])["value"].sum()
    np.testing.assert_allclose(sums, 1.0, atol=1e-12)
    clients = numbers(folder / "clients.csv").dropna(subset=["weight"]).set_index(["round", "client"])
    means = details.groupby(["round", "client"])["value"].mean()
    np.testing.assert_allclose(clients["weight"].sort_index(), means.sort_index(), atol=1e-12)
    assert sorted(details["round"].unique()) == [0, 1, 2, 3]


def test_gap_of_generalization_adjustment(tmp_path, monkeypatch):
    """The gap is the received model's training loss minus that of the client's own last model."""
    from clients.reports.generalization_gap import GeneralizationGap

    risks = []
    original = GeneralizationGap._risk
    monkeypatch.setattr(
        GeneralizationGap, "_risk", lambda self, round: risks.append(original(self, round)) or risks[-1]
    )
    folder, _ = run_small(small_experiment(tmp_path, "feddg-ga", train={"rounds": 2}))
    clients = numbers(folder / "clients.csv").set_index(["round", "client"])
    assert (clients.loc[1, "gap_valid"] == 0).all()
    first_after, second = risks[:3], risks[3:]
    expected = [second[2 * index] - first_after[index] for index in range(3)]
    np.testing.assert_allclose(clients.loc[2, "gap"], expected, rtol=1e-12)
    np.testing.assert_allclose(clients.loc[1, "weight"], 1 / 3)
    assert clients.loc[2, "weight"].nunique() == 3


def test_gap_on_validation_loss(tmp_path, monkeypatch):
    """The risks are losses on the validation split: that of the received model is what the clients had recorded."""
    from clients.reports.generalization_gap import GeneralizationGap

    risks = []
    original = GeneralizationGap._risk
    monkeypatch.setattr(
        GeneralizationGap, "_risk", lambda self, round: risks.append(original(self, round)) or risks[-1]
    )
    method = {"name": "feddg-ga", "generalization_gap": {"metric": "validation_loss"}}
    folder, _ = run_small(small_experiment(tmp_path, method, train={"rounds": 2}))
    clients = numbers(folder / "clients.csv").set_index(["round", "client"])
    received = [risks[3 + 2 * index] for index in range(3)]
    np.testing.assert_allclose(clients.loc[1, "validation_loss"], received, rtol=1e-6)
    np.testing.assert_allclose(clients.loc[2, "gap"], np.subtract(received, risks[:3]), rtol=1e-12)
    assert clients.loc[2, "weight"].nunique() == 3


def test_gap_on_validation_accuracy_and_subset(tmp_path):
    """The other metric, and a fixed subset of the training examples, give other weights that still sum to one."""
    for index, fields in enumerate(({"metric": "validation_accuracy"}, {"max_samples": 20})):
        method = {"name": "feddg-ga", "generalization_gap": fields}
        folder, _ = run_small(small_experiment(tmp_path / str(index), method))
        clients = numbers(folder / "clients.csv").dropna(subset=["weight"])
        np.testing.assert_allclose(clients.groupby("round")["weight"].sum(), 1.0)


def test_a_late_client_acquires_from_the_initial_model(tmp_path):
    """Stage A starts from the initial model, also on the first participation of a late client."""
    experiment = small_experiment(tmp_path, {"name": "csac"}, train={"rounds": 2, "lr": 1e-12})
    space = Workspace(resolve(experiment))
    client = space.client("rot0", "")
    initial = {name: value.clone() for name, value in space.plan.build_net().named_parameters()}
    received = [client.state[name].numpy() + 1 for name in client.names("train")]
    arrays, _, _ = client.fit(received, {"round": 2, "phase": "train", "client": "rot0"})
    acquired = client.store.get(ACQUIRED)
    for name, value in initial.items():
        assert torch.allclose(acquired[name], value, atol=1e-6)
    sent = dict(zip(client.upload_names(), arrays))
    for name, value in zip(client.names("train"), received):  # calibration goes on from what was received
        if name in initial:
            assert np.allclose(sent[name], value, atol=1e-6)
