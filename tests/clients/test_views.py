"""RandConv and AugMix's step: losses of three views."""

import math

import pytest
import torch
from small_round import colour_images, small_data, small_round, step_of

from clients.objective.consistent_views import ConsistentViews
from clients.objective.random_convolution import RandomConvolution, convolved, random_kernel
from clients.optimizers import make_optimizer
from clients.step.supervised import SupervisedStep
from clients.tools.losses import js_divergence
from fedsim.models import build_model
from fedsim.settings import ModelSettings


def test_divergence_numbers():
    """(1,0), (0,1), (0,1) give .636514; equal predictions 0, disjoint ones log 3; three given ones .169901."""
    sure = 60.0
    one, two = torch.tensor([[sure, 0.0]]), torch.tensor([[0.0, sure]])
    assert js_divergence([one, two, two]).item() == pytest.approx(0.636514, abs=1e-6)
    assert js_divergence([one, one, one]).item() == pytest.approx(0, abs=1e-7)
    assert js_divergence(list((sure * torch.eye(3))[:, None])).item() == pytest.approx(math.log(3), abs=1e-6)
    given = [torch.tensor([p]).log() for p in ((0.7, 0.2, 0.1), (0.5, 0.3, 0.2), (0.1, 0.8, 0.1))]
    assert js_divergence(given).item() == pytest.approx(0.169901, abs=1e-6)


def test_kernels():
    """Deviations depend on the kernel's size, sizes are uniform, and means are zero; images keep their size."""
    generator = torch.Generator().manual_seed(0)
    for size, deviation in ((1, 0.57735), (3, 0.19245), (5, 0.11547), (7, 0.08248)):
        kernels = torch.stack([random_kernel(3, (size,), generator) for _ in range(600)])
        assert kernels.std().item() == pytest.approx(deviation, rel=0.04)
        assert kernels.shape[1:] == (3, 3, size, size)
        assert convolved(torch.rand(2, 3, 9, 11), kernels[0]).shape == (2, 3, 9, 11)
    drawn = [random_kernel(3, (1, 3, 5, 7), generator).shape[-1] for _ in range(400)]
    assert all(drawn.count(size) > 70 for size in (1, 3, 5, 7))


def test_views():
    """`mix` is between the image and its convolution; img_p is about the share of unchanged images."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, 8, 8)
    drawn = [RandomConvolution("img_p", p=0.25).view(x, generator).equal(x) for _ in range(400)]
    assert sum(drawn) / 400 == pytest.approx(0.25, abs=0.06)
    state = generator.get_state()
    view = RandomConvolution().view(x, generator)
    generator.set_state(state)
    alpha = float(torch.rand((), generator=generator))
    other = convolved(x, random_kernel(3, (1, 3, 5, 7), generator))
    assert torch.allclose(view, alpha * other + (1 - alpha) * x, atol=1e-6)


def one_step(part, weights=None):
    """(loss, network, round) after a step of a part on the same batch."""
    torch.manual_seed(0)
    net = build_model(ModelSettings(backbone="digits-cnn-bn", bottleneck=8), 3, 3, 28, None, 0).train()
    data = small_data(colour_images(6, size=28))
    round = small_round(data, net=net, steps=1)
    round.optimizer = make_optimizer(net, round.train, 0.05)
    names = set(net.state_dict())
    loss = step_of(part, round)(data.batch(data.training_positions()))
    assert set(net.state_dict()) == names
    assert sum(len(group["params"]) for group in round.optimizer.param_groups) == len(list(net.parameters()))
    return loss, net, round


@pytest.mark.parametrize("part", [RandomConvolution("img_p", weight=0.0, p=1.0), ConsistentViews(weight=0.0)])
def test_neutral_settings_are_the_supervised_step(part):
    """They are equal bit for bit."""
    loss, net, _ = one_step(part)
    wanted, plain, _ = one_step(SupervisedStep())
    assert loss.equal(wanted)
    assert all(a.equal(b) for a, b in zip(net.state_dict().values(), plain.state_dict().values()))


def test_no_change_has_no_divergence():
    """Three equal views have JS = 0."""
    _, _, round = one_step(RandomConvolution("img_p", weight=3.0, p=1.0))
    assert round.tallied()["js_loss"] == pytest.approx(0, abs=1e-7)


def test_mix_with_alpha_0_is_the_image(monkeypatch):
    """The default variant: the loss is that of the supervised step."""
    wanted, _, _ = one_step(SupervisedStep())
    x = torch.rand(2, 3, 8, 8)
    monkeypatch.setattr("clients.objective.random_convolution.torch.rand", lambda *size, **options: torch.zeros(()))
    assert RandomConvolution().view(x, torch.Generator()).equal(x)
    loss, _, round = one_step(RandomConvolution())
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert round.tallied()["js_loss"] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(("part", "passes"), [(RandomConvolution(), 3), (ConsistentViews(), 1)])
def test_a_step_moves_the_network(part, passes):
    """Loss and divergence are finite; kernels are neither in the state nor in the optimizer; passes are counted."""
    loss, net, round = one_step(part)
    assert math.isfinite(loss.item())
    assert round.tallied()["js_loss"] > 0
    assert int(net.state_dict()["backbone.norm1.num_batches_tracked"]) == passes
