"""The client-agnostic step: its properties, with and without adapters, and its settings."""

import pytest
import torch
import torch.nn.functional as F
from small_round import changed, digits_net, small_round, snapshot, step_of

from clients.objective.client_agnostic import ClientAgnostic, cafl
from clients.optimizers import make_optimizer
from clients.parts import Batch
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.models.norms import MixIG
from fedsim.models.norms.mixig import mixig_layers
from fedsim.settings.experiment import Experiment
from fedsim.tensors.kinds import bn_scope
from strategies.banks.global_batch_norm import GlobalBatchNorm

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


def local_round(net, **train):
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
        round = local_round(net, momentum=0.0)
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
        round = local_round(net, persist_optimizer=persist)
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
])  # fmt: skip
def test_combinations_that_make_no_sense(method, settings, words):
    with pytest.raises(UserError, match=words):
        build_recipe(Experiment(method={"name": method, **settings}))
