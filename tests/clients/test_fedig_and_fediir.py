"""FedIG's client-agnostic step, and FedIIR: client, server, and the exchange before training."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Error, Message
from small_round import changed, digits_net, ready_round, small_net, small_round, snapshot, step_of
from support import run_small, tiny_experiment
from torch import nn

from clients.objective.client_agnostic import ClientAgnostic, cafl
from clients.optimizers import make_optimizer
from clients.parts import Batch
from clients.terms.classifier_alignment import ClassifierAlignment, squared_distance
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.models.norms import MixIG
from fedsim.models.norms.mixig import mixig_layers
from fedsim.settings import TrainSettings
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import record_to_arrays
from fedsim.tensors.kinds import bn_scope
from strategies.banks.classifier_gradients import ClassifierGradients
from strategies.banks.global_batch_norm import GlobalBatchNorm
from strategies.parts import SERVER, ServerRound

HEAD = {"head.weight", "head.bias"}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def make_net(norm=None, *, bottleneck=8):
    net = digits_net(28, 1, bottleneck, norm, 10)
    with torch.no_grad():
        net.train()(torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(4)))
    return net


def arrays_of(net):
    return {name: value.numpy().copy() for name, value in net.state_dict().items()}


def fedig_round(net, **train):
    settings = Experiment(train={"lr": 0.05, "momentum": 0.5, **train}).train
    records = {GlobalBatchNorm.name: arrays_of(net)}
    round = small_round(None, records, net, train=settings, classes=10, round=2, rounds=4, lr=settings.lr)
    round.optimizer = make_optimizer(net, settings, settings.lr)
    return round


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    return Batch(torch.rand(12, 1, 28, 28, generator=generator), torch.arange(12) % 10)


def test_cafl_numbers():
    """The function is the paper's equation; the part asks for the mean over the dimensions."""
    f, mixed = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 2.0], [3.0, 4.0]])
    assert cafl(f, mixed).item() == cafl(f, mixed, "sum").item() == 13.0
    assert cafl(f, mixed, "mean").item() == 6.5
    assert ClientAgnostic().cafl_reduction == "mean"


def test_cacl_reaches_the_classifier_alone(batch):
    """Without CAFL, and with a term that removes CE, only the head changes, by lambda1 times the CE gradient on f_D."""
    net = make_net(MixIG(u=(0.5, 0.5)))
    before, layers = snapshot(net), mixig_layers(net).values()

    def take(lambda2):
        round = fedig_round(net, momentum=0.0)
        round.terms = [lambda batch: -batch.loss]
        step_of(ClientAgnostic(lambda1=0.3, lambda2=lambda2), round)(batch)

    take(1e-300)  # 0 in float32, but f_D has gradients
    affine = {name for name in bn_scope(net) if name.endswith(("weight", "bias"))}
    assert changed(net, before) - set(bn_scope(net)) == HEAD
    assert not changed(net, before) & affine
    net.load_state_dict(before)
    for layer in layers:
        layer.mode, layer.u = "mixed", torch.full_like(layer.global_mean, 0.5)
    loss = F.cross_entropy(net.head(net.features(batch.images).detach()), batch.labels)
    (gradient,) = torch.autograd.grad(loss, [net.head.weight])
    for layer in layers:
        layer.mode = "local"
    take(0.0)
    torch.testing.assert_close(net.head.weight, before["head.weight"] - 0.05 * 0.3 * gradient, atol=1e-6, rtol=1e-4)


def test_adapter_momentum_is_kept_when_asked_for(batch):
    net, step = make_net(MixIG(adapter=True)), ClientAgnostic()
    for persist in (True, False):
        round = fedig_round(net, persist_optimizer=persist)
        step_of(step, round)(batch)
        step.end(round)
        round.store.commit()
        kept = round.store.get("adapter-optimizer")
        assert len(kept or ()) == (8 if persist else 0)  # two layers of four tensors
        if persist:
            assert any(value.abs().sum() > 0 for value in kept.values())
            round.store.open_round(3)
            step_of(step, round)(batch)


@pytest.mark.parametrize(("method", "settings", "words"), [
    ("fedig", {"share": "everything"}, "clients upload tensors"),
    ("fedig", {"without_batch_norm": {"upload": False}}, "clients upload tensors"),
    ("gperxan", {"objective": "client_agnostic"}, "track both passes"),
    ("fedbn", {"objective": "client_agnostic"}, "needs a second view"),
    ("fediir+randaugment", {}, "classifier_alignment assumes that a step gets the images as"),
])  # fmt: skip
def test_combinations_that_make_no_sense(method, settings, words):
    with pytest.raises(UserError, match=words):
        build_recipe(Experiment(method={"name": method, **settings}))


PREVIOUS = {"head.weight": np.zeros((2, 2), np.float32), "head.bias": np.zeros(2, np.float32)}


def sums(weight, count):
    """A contribution whose only non-zero gradient is the first row of the weight."""
    return {**PREVIOUS, "head.weight": np.array([weight, (0, 0)], np.float32), "batches": np.array([count], np.float32)}


def test_running_mean_and_penalty_by_hand():
    """Batch gradients (1, 0) and (0, 1), g = 0, ema .95: (.025, .025). Then one client with three batches: by hand.
    Batch gradient (1, 0) with g = (.025, .025): .95125, which gamma = 1e-3 makes .00095125."""
    bank, server = ClassifierGradients(), ServerRound(1, 3, ["a", "b"], PREVIOUS)
    first = bank.merge({}, {"a": sums((1, 0), 1), "b": sums((0, 1), 1)}, server)
    np.testing.assert_allclose(first[SERVER]["head.weight"][0], (0.025, 0.025), rtol=1e-6)
    assert bank.hand_out(first, "b", server).keys() == PREVIOUS.keys()
    second = bank.merge(first, {"a": sums((3, 0), 2), "b": sums((0, 1), 2)}, server)
    np.testing.assert_allclose(second[SERVER]["head.weight"][0], (0.06125, 0.03625), rtol=1e-6)
    assert bank.accept("a", sums((1, 0), 1), server) == ""
    assert "batches is 0" in bank.accept("a", sums((1, 0), 0), server)
    assert "'batches'" in bank.accept("a", PREVIOUS, server)
    own, mean = [torch.tensor([1.0, 0.0])], [torch.tensor([0.025, 0.025])]
    assert squared_distance(own, mean).item() == pytest.approx(0.95125)
    net = nn.Module()
    net.head = nn.Linear(2, 1, bias=False)
    round = small_round(None, {"classifier_gradient": {"head.weight": mean[0].numpy()[None]}}, net)
    batch = Batch(torch.zeros(1), torch.zeros(1), loss=net.head(torch.tensor([1.0, 0.0])).sum())
    assert ClassifierAlignment().begin(round)(batch).item() == pytest.approx(0.00095125)


def test_contribution_is_the_sum_over_batches():
    """Seven images in batches of three: three batches whose mean gradients add up; nothing of the network moves."""
    net = small_net()
    round, before, expected = ready_round(net, images=7, train=TrainSettings(batch_size=3)), snapshot(net), 0
    found = ClassifierAlignment().collect(round)
    assert found["batches"].tolist() == [3.0]
    assert not changed(net, before)
    for places in np.split(round.rng("classifier gradient").permutation(7), (3, 6)):
        batch = round.data.batch(places)
        with torch.no_grad():  # (softmax - onehot)^T features / B, by hand
            features = net.features(batch.images)
            error = net.head(features).softmax(1) - F.one_hot(batch.labels, 3)
        expected = expected + (error.T @ features / len(places)).numpy()
    np.testing.assert_allclose(found["head.weight"], expected, rtol=1e-4, atol=1e-6)


def test_gradients_reach_the_first_convolution_through_the_penalty_alone():
    """Without the cross-entropy's own gradient, central differences agree with the second-order gradient."""
    net = small_net().double()
    record = {name: np.full(value.shape, 0.01) for name, value in net.head.named_parameters("head")}
    round = ready_round(net, {"classifier_gradient": record})
    net.eval()  # so that both sides are on the same side of the kinks of ReLU and batch norm
    term = ClassifierAlignment(gamma=2.0).begin(round)
    images, labels = round.data.batch(np.arange(6)).images.double(), torch.arange(6) % 3

    def penalty():
        return term(Batch(images, labels, loss=F.cross_entropy(net(images), labels)))

    penalty().backward()
    gradient, weight = net.backbone[0].weight.grad.flatten(), net.backbone[0].weight.data.view(-1)
    place, values = int(gradient.abs().argmax()), []
    for change in (1e-5, -1e-5):
        weight[place] += change
        values.append(penalty().item())
        weight[place] -= change
    assert gradient[place] != 0
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(gradient[place].item(), rel=1e-3)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_round_without_a_model_leaves_the_running_mean_as_it_was(tmp_path, kind):
    """Nobody trains in round 2, or can use its model: its gradients are forgotten, g_3 = ema g_1 + (1 - ema) new."""

    def tamper(message, reply):
        if (message.content["config"].get("round"), message.metadata.message_type) != (2, kind):
            return reply
        reply.content["metrics"]["loss"] = float("nan")
        return reply if kind == "evaluate" else Message(Error(2, "gone"), reply_to=message)

    experiment = tiny_experiment(tmp_path, "fediir", 3, run={"on_client_failure": "continue"})
    mean, entries = {}, {}
    for message, reply in run_small(experiment, tamper=tamper)[1].seen:
        config = message.content["config"]
        if config["phase"] == "collect":
            own = record_to_arrays(reply.content["classifier_gradient"])
            entries.setdefault(config["round"], {})[config["client"]] = own
        elif config["phase"] == "train":
            mean[config["round"]] = record_to_arrays(message.content["classifier_gradient"])
    bank, server = ClassifierGradients(), ServerRound(3, 3, [], PREVIOUS)
    for number in (2, 3):
        wanted = bank.merge({SERVER: mean[1]}, entries[number], server)[SERVER]
        for name, array in wanted.items():
            np.testing.assert_allclose(mean[number][name], array, rtol=1e-6, err_msg=f"{name} of round {number}")
