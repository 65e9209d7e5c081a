"""FedIIR: client, server, and the exchange before training."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Error, Message, MetricRecord, RecordDict
from safetensors.numpy import load_file
from small_round import colour_images, small_data, small_round
from support import numbers, run_small, small_experiment
from torch import nn

from clients.parts import Batch
from clients.terms.classifier_alignment import ClassifierAlignment, squared_distance
from fedsim.common.errors import UserError
from fedsim.methods.assembly import find_recipe
from fedsim.models.net import Net
from fedsim.settings import TrainSettings
from fedsim.tensors.arrays import record_to_arrays
from strategies.banks.classifier_gradients import ClassifierGradients
from strategies.parts import SERVER, ServerRound

HEAD = {"head.weight": np.zeros((2, 2), np.float32), "head.bias": np.zeros(2, np.float32)}


def sums(weight, count):
    """A contribution whose only non-zero gradient is the first row of the weight."""
    first = np.array([weight, (0, 0)], np.float32)
    return {"head.weight": first, "head.bias": np.zeros(2, np.float32), "batches": np.array([count], np.float32)}


def test_running_mean_by_hand():
    """Batch gradients (1, 0) and (0, 1), g = 0, ema .95: (.025, .025). Then one client with three batches: by hand."""
    bank, server = ClassifierGradients(), ServerRound(1, 3, ["a", "b"], HEAD)
    first = bank.merge({}, {"a": sums((1, 0), 1), "b": sums((0, 1), 1)}, server)
    np.testing.assert_allclose(first[SERVER]["head.weight"][0], (0.025, 0.025), rtol=1e-6)
    assert bank.hand_out(first, "b", server).keys() == HEAD.keys()
    second = bank.merge(first, {"a": sums((3, 0), 2), "b": sums((0, 1), 2)}, server)
    np.testing.assert_allclose(second[SERVER]["head.weight"][0], (0.06125, 0.03625), rtol=1e-6)


def test_penalty_by_hand():
    """Batch gradient (1, 0) with g = (.025, .025): .95125, which gamma = 1e-3 makes .00095125."""
    own, mean = [torch.tensor([1.0, 0.0])], [torch.tensor([0.025, 0.025])]
    assert squared_distance(own, mean).item() == pytest.approx(0.95125)
    net = nn.Module()
    net.head = nn.Linear(2, 1, bias=False)
    record = {"head.weight": mean[0].numpy()[None]}
    round = small_round(small_data(colour_images(3)), {"classifier_gradient": record}, net)
    batch = Batch(torch.zeros(1), torch.zeros(1), loss=net.head(torch.tensor([1.0, 0.0])).sum())
    assert ClassifierAlignment().begin(round)(batch).item() == pytest.approx(0.00095125)


def test_what_is_no_classifier_gradient_is_refused():
    bank, server = ClassifierGradients(), ServerRound(1, 3, ["a"], {**HEAD, "backbone.w": np.zeros(3, np.float32)})
    assert bank.accept("a", sums((1, 0), 1), server) == ""
    assert "batches is 0" in bank.accept("a", sums((1, 0), 0), server)
    assert "'batches'" in bank.accept("a", HEAD, server)


class Tiny(nn.Module):
    """A convolution, batch norm, and the mean of each map."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)).relu().mean((2, 3))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net(Tiny(), 4, 3)


def test_contribution_is_the_sum_over_batches(net):
    """Seven images in batches of three: three batches whose mean gradients add up; nothing of the network moves."""
    round = small_round(small_data(colour_images(7)), net=net, train=TrainSettings(batch_size=3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = ClassifierAlignment().collect(round)
    assert found["batches"].tolist() == [3.0]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    order = round.rng("classifier gradient").permutation(7)
    expected = np.zeros((3, 4))
    for places in (order[:3], order[3:6], order[6:]):  # (softmax - onehot)^T features / B, by hand
        batch = round.data.batch(places)
        with torch.no_grad():
            features = net.features(batch.images)
            error = net.head(features).softmax(1) - F.one_hot(batch.labels, 3)
        expected += (error.T @ features / len(places)).numpy()
    np.testing.assert_allclose(found["head.weight"], expected, rtol=1e-4, atol=1e-6)


def test_gradients_reach_the_first_convolution_through_the_penalty_alone(net):
    """Without the cross-entropy's own gradient, central differences agree with the second-order gradient."""
    net = net.double().eval()  # so that both sides are on the same side of the kinks of ReLU and batch norm
    record = {name: np.full(value.shape, 0.01) for name, value in net.head.named_parameters("head")}
    data = small_data(colour_images(6))
    round = small_round(data, {"classifier_gradient": record}, net)
    term = ClassifierAlignment(gamma=2.0).begin(round)
    images, labels = data.batch(np.arange(6)).images.double(), torch.arange(6) % 3

    def penalty():
        batch = Batch(images, labels)
        batch.loss = F.cross_entropy(net(batch.images), labels)
        return term(batch)

    penalty().backward()
    gradient = net.backbone.conv.weight.grad.flatten()
    assert gradient.abs().max() > 0
    place = int(gradient.abs().argmax())
    values = []
    weight = net.backbone.conv.weight.data.view(-1)
    for change in (1e-5, -1e-5):
        weight[place] += change
        values.append(penalty().item())
        weight[place] -= change
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(gradient[place].item(), rel=1e-3)


def test_neutral_gamma_is_uniform_fedavg_and_the_trip_is_counted(tmp_path):
    """With gamma = 0 it is FedAvg with equal weights, bit for bit, although gradients are collected.

    The bytes of both exchanges are counted.
    """
    method = {"name": "fediir", "classifier_alignment": {"gamma": 0.0}}
    ours, grid = run_small(small_experiment(tmp_path / "a", method))
    plain, _ = run_small(small_experiment(tmp_path / "b", {"name": "fedavg", "weights": "uniform"}))
    a, b = (load_file(folder / "last.safetensors") for folder in (ours, plain))
    assert all(np.array_equal(a[name], b[name]) for name in b)
    kinds = [
        message.metadata.message_type for message, _ in grid.seen if message.content.config_records["config"]["round"]
    ]
    assert kinds[:9] == ["query.collect"] * 3 + ["train"] * 3 + ["evaluate"] * 3
    own, other = numbers(ours / "clients.csv"), numbers(plain / "clients.csv")
    trained = own["round"] > 0
    head = 4 * (50 * 10 + 10)
    down = own["bytes_down"] - other["bytes_down"]
    model = other.loc[trained, "bytes_up"].iloc[0]
    assert set(down[trained]) == {model + head}
    assert set((own["bytes_up"] - other["bytes_up"])[trained]) == {head + 4}


def useless_round(message, reply):
    """Nobody can use the model of round 2."""
    metrics = {**dict(reply.content.metric_records["metrics"]), "loss": float("nan")}
    return Message(RecordDict({**reply.content, "metrics": MetricRecord(metrics)}), reply_to=message)


def lost(message, reply):
    """The reply is an error."""
    return Message(Error(2, "gone"), reply_to=message)


@pytest.mark.parametrize(("kind", "change"), [("train", lost), ("evaluate", useless_round)])
def test_a_round_without_a_model_leaves_the_running_mean_as_it_was(tmp_path, kind, change):
    """The gradients that came before its training are forgotten: g_3 = ema g_1 + (1 - ema) new."""

    def tamper(message, reply):
        config = message.content.config_records["config"]
        return change(message, reply) if (message.metadata.message_type, config["round"]) == (kind, 2) else reply

    experiment = small_experiment(tmp_path, "fediir", run={"on_client_failure": "continue"})
    _, grid = run_small(experiment, tamper=tamper)
    mean, entries = {}, {}
    for message, reply in grid.seen:
        config = message.content.config_records["config"]
        if config["phase"] == "collect":
            own = record_to_arrays(reply.content.array_records["classifier_gradient"])
            entries.setdefault(config["round"], {})[config["client"]] = own
        elif config["phase"] == "train":
            mean[config["round"]] = record_to_arrays(message.content.array_records["classifier_gradient"])
    bank, server = ClassifierGradients(), ServerRound(3, 3, [], HEAD)
    for number in (2, 3):
        wanted = bank.merge({SERVER: mean[1]}, entries[number], server)[SERVER]
        for name, array in wanted.items():
            np.testing.assert_allclose(mean[number][name], array, rtol=1e-6, err_msg=f"{name} of round {number}")


@pytest.mark.parametrize("pair", ["fediir+randaugment", "ccst+fediir"])
def test_images_that_phase_1_does_not_see_are_refused(pair):
    """A mean gradient of other images than those of training would pull the classifier's gradient away from its own."""
    with pytest.raises(UserError, match="classifier_alignment assumes that a step gets the images as"):
        find_recipe(pair)


def test_a_client_that_did_not_contribute_does_not_train(tmp_path):
    """Its reply to the collection is an error: the round continues with the others, and the client is in the next."""

    def tamper(message, reply):
        config = message.content.config_records["config"]
        if config["phase"] == "collect" and config["round"] == 2 and config["client"] == "rot15":
            return Message(Error(2, "gone"), reply_to=message)
        return reply

    _, grid = run_small(small_experiment(tmp_path, "fediir", run={"on_client_failure": "continue"}), tamper=tamper)
    trained = [
        (message.content.config_records["config"]["round"], message.content.config_records["config"]["client"])
        for message, _ in grid.seen
        if message.metadata.message_type == "train"
    ]
    assert (2, "rot15") not in trained
    assert (3, "rot15") in trained
    assert len(trained) == 8
