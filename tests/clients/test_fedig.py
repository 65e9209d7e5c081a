"""The client-agnostic step: its properties, with and without adapters, and its settings."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from small_round import changed, digits_net, small_round, snapshot, step_of
from torch import nn

from clients.objective.client_agnostic import ClientAgnostic, cafl
from clients.optimizers import make_optimizer
from clients.parts import Batch, LocalRound
from clients.step.supervised import SupervisedStep
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.models.inserts.mixstyle import MixStyle
from fedsim.models.norms import MixIG
from fedsim.models.norms.mixig import mixig_layers
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import load_arrays
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


def test_lambdas_0_train_as_fedbn(batch):
    plain, net = make_net(), make_net(MixIG())
    for one, step in ((plain, SupervisedStep()), (net, ClientAgnostic(lambda1=0.0, lambda2=0.0))):
        take = step_of(step, local_round(one))
        for _ in range(3):
            take(batch)
    for value, own in zip(plain.state_dict().values(), net.state_dict().values(), strict=True):
        assert torch.equal(value, own)


def test_two_forward_passes_and_no_mode_left_behind(batch):
    net, calls = make_net(MixIG(adapter=True)), []
    round = local_round(net)
    for layer in mixig_layers(net).values():
        layer.register_forward_hook(lambda module, inputs, output: calls.append(module.mode))
    step_of(ClientAgnostic(), round)(batch)
    assert calls == ["local"] * 3 + ["mixed"] * 3 + ["adapted"] * 3
    assert all(layer.mode == "local" for layer in mixig_layers(net).values())
    assert all(norm.track_running_stats for norm in net.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm))
    assert sorted(round.sums) == ["adapter_loss", "cacl_loss", "cafl_loss", "ce_loss"]


def test_steps_of_main_network_and_adapter_are_apart(batch, monkeypatch):
    net, seen, take_step = make_net(MixIG(adapter=True)), [], LocalRound.take_step
    monkeypatch.setattr(LocalRound, "take_step", lambda round: (take_step(round), seen.append(snapshot(net))))
    before, round = snapshot(net), local_round(net, weight_decay=0.1)
    round.terms = [lambda batch: sum(parameter.square().sum() for parameter in net.parameters())]  # a proximal pull
    step_of(ClientAgnostic(), round)(batch)
    (main,) = seen
    adapter = {name for name in before if ".adapter." in name}
    assert all(before[name].equal(main[name]) for name in adapter)
    assert adapter >= changed(net, main) != set()
    assert all(not parameter.requires_grad for name, parameter in net.named_parameters() if name in adapter)


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


def test_mixstyle_inside_the_losses(batch):
    plain, net = make_net(), make_net()
    MixStyle(p=1.0, stages=(1,)).apply(net)
    round = local_round(net)
    step = step_of(ClientAgnostic(lambda1=0.1, lambda2=1.0), round)
    assert not net.inserts[0].second_view
    step(batch)
    assert float(round.sums["cafl_loss"]) > 0
    SupervisedStep().begin(local_round(plain))(batch)
    assert net.backbone.norm1.num_batches_tracked == plain.backbone.norm1.num_batches_tracked
    torch.testing.assert_close(net.backbone.norm1.running_mean, plain.backbone.norm1.running_mean)


@pytest.mark.parametrize(("method", "settings", "words"), [
    ("fedig", {"share": "everything"}, "clients upload tensors"),
    ("fedig", {"without_batch_norm": {"upload": False}}, "clients upload tensors"),
    ("gperxan", {"objective": "client_agnostic"}, "track both passes"),
    ("fedbn", {"objective": "client_agnostic"}, "needs a second view"),
])  # fmt: skip
def test_combinations_that_make_no_sense(method, settings, words):
    with pytest.raises(UserError, match=words):
        build_recipe(Experiment(method={"name": method, **settings}))


def test_settings_of_the_tables():
    def recipe(name, **settings):
        return build_recipe(Experiment(method={"name": name, **settings}))

    assert recipe("fedig-a", mix_ig={"u": [-0.1, 1.1]}).norm == MixIG(adapter=True, u=(-0.1, 1.1))
    table3 = recipe("fedbn+mixstyle", objective="client_agnostic", client_agnostic={"lambda2": 2.0})
    assert (table3.objective, table3.inserts) == (ClientAgnostic(lambda2=2.0), (MixStyle(),))


def test_global_arrays_load_into_the_layers_that_infer():
    net = make_net(MixIG(adapter=True))
    arrays, name = arrays_of(net), "backbone.norm1.bn.running_mean"
    arrays[name] += 1
    load_arrays(net, arrays)
    torch.testing.assert_close(net.backbone.norm1.norm.running_mean, torch.tensor(arrays[name]))


def trained_by(reduction, net, batches):
    round = local_round(net, lr=0.01)
    step, ratios = step_of(ClientAgnostic(cafl_reduction=reduction), round), []
    for batch in batches:
        round.sums.clear()
        step(batch)
        ratios.append(float(4 * round.sums["cafl_loss"] / round.sums["ce_loss"]))
    return ratios


def test_the_papers_lambda_trains_with_the_mean_and_explodes_with_the_sum():
    """After 70 plain steps with a bottleneck of 256, the mean stays about as large as the cross-entropy.

    The sum over dimensions is 256 times as large, and training with it ends in NaN within ten steps.
    """
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, 28)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split(32)
    batches = [Batch(images[part], labels[part]) for part in order[:55]]
    net = make_net(MixIG(), bottleneck=256)
    plain = SupervisedStep().begin(local_round(net, lr=0.01))
    for batch in [*batches, *batches][:70]:
        plain(batch)
    start, mean = snapshot(net), trained_by("mean", net, batches[:15])
    assert all(0.3 < ratio < 6 for ratio in mean)
    net.load_state_dict(start)
    total = trained_by("sum", net, batches[:10])
    assert total[0] == pytest.approx(256 * mean[0], rel=1e-3)
    assert math.isnan(total[-1])
