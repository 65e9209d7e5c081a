"""MixStyle: numbers worked out by hand, and properties."""

import copy

import pytest
import torch
from networks import build

from fedsim.models.inserts.mixstyle import MixStyle, MixStyleLayer, mix_styles, moved_style, style_of


def test_numbers_and_gradients():
    """Two images with half of each other's style, and one with colours of another."""
    x = torch.tensor([[1.0, 3.0], [10.0, 14.0]]).view(2, 1, 1, 2)
    swapped = mix_styles(x, torch.tensor([1, 0]), torch.full((2,), 0.5))
    torch.testing.assert_close(swapped[0].flatten(), torch.tensor([5.5, 8.5]), atol=1e-5, rtol=0)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 2, 2)
    other = torch.full((1, 1, 1, 1), 10.0), torch.full((1, 1, 1, 1), 2.0)
    for lam, wanted in ((0.25, [6.007158, 7.419053, 8.830947, 10.242842]), (1.0, [1.0, 2.0, 3.0, 4.0])):
        moved = moved_style(x, style_of(x), other, torch.tensor([lam]))
        assert moved.flatten().tolist() == pytest.approx(wanted, abs=2e-6)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    permutation = torch.tensor([1, 2, 3, 0])
    mix_styles(x, permutation, torch.zeros(4)).sum().backward()
    std = torch.sqrt(x.detach().var((2, 3)) + 1e-6)
    expected = (std[permutation] / std)[:, :, None, None].expand_as(x)
    torch.testing.assert_close(x.grad, expected)


def test_when_the_layer_acts_also_in_a_network():
    x = torch.randn(8, 3, 5, 5)
    layer = MixStyleLayer(p=1.0, alpha=0.1, eps=1e-6).train()
    assert not torch.equal(layer(x), x)
    assert torch.equal(layer(x[:1]), x[:1])
    assert layer.eval()(x) is x
    assert MixStyleLayer(p=0.0, alpha=0.1, eps=1e-6).train()(x) is x
    layer.train().second_view = False
    assert layer(x) is x
    acted = [not torch.equal(MixStyleLayer(0.5, 0.1, 1e-6).train()(x), x) for _ in range(200)]
    assert 70 < sum(acted) < 130
    plain, net = build("resnet18"), build("resnet18")
    MixStyle(p=1.0, stages=(1, 2)).apply(net)
    assert (list(net.state_dict()), len(net.inserts)) == (list(plain.state_dict()), 2)
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(net.eval()(x), plain.eval()(x))
    assert not torch.allclose(net.train()(x), plain.train()(x))
    frozen = copy.deepcopy(net).eval()  # its hooks act on its own layers, not on those of the training network
    assert torch.equal(frozen(x), frozen(x))
