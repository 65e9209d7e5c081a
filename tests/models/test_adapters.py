"""PerAda's adapters."""

import copy

import pytest
import torch
from networks import build, outline
from torch import nn

from fedsim.models.inserts.adapters import Adapter, Adapters, MapDropout


def test_adapter_with_zero_weights_is_the_identity():
    """This holds bit for bit; an initial adapter changes a normalized input by at most O(1e-3)."""
    adapter, x = Adapter(64, 0.3, 1e-4), torch.randn(8, 64, 4, 4)
    assert 0 < (adapter(x) - x).abs().max() < 1e-2
    nn.init.zeros_(adapter.conv.weight)
    assert torch.equal(adapter(x), x)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dropout_of_maps(layout):
    """Values are zero with probability p, else divided by 1 - p; in eval mode and with p = 0 nothing is changed."""
    x = torch.full((32, 10, 25, 25), 2.0).contiguous(memory_format=layout).requires_grad_()
    dropout = MapDropout(0.3)
    y = dropout(x)
    zeros = y == 0
    assert zeros.float().mean().item() == pytest.approx(0.3, abs=0.005)  # 4.9 standard deviations
    assert zeros.float().mean((1, 2, 3)).std() < 0.02
    assert torch.allclose(y[~zeros], torch.tensor(2 / 0.7))
    y.sum().backward()
    assert torch.equal(x.grad == 0, zeros)
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(MapDropout(0.0)(x), x)


def test_what_is_trained_and_exchanged():
    """7.4, with 513 for each of 7 classes; one adapter after the last norm of each block of other backbones."""
    net = outline("resnet18", insert=Adapters())
    trained = {name: value.numel() for name, value in net.named_parameters() if name not in net.frozen}
    assert sum(trained.values()) == 1_411_719
    assert sum(count for name, count in trained.items() if name.startswith("adapters.")) == 1_400_320
    statistics = [value for name, value in net.named_buffers() if name not in net.frozen and value.is_floating_point()]
    assert sum(value.numel() for value in statistics) == 15_488
    assert {"backbone.layer2.0.downsample.1.running_mean", "backbone.bn1.weight"} & net.frozen == {
        "backbone.layer2.0.downsample.1.running_mean"
    }
    assert [len(outline(name, insert=Adapters()).adapters) for name in ("digits-cnn-bn", "resnet50")] == [1, 16]


def test_adapters_lie_before_the_norms_of_a_residual_block():
    """A copy of the network calls its own adapters, and an adapter sees the output of its convolution."""
    net, seen, x = build("resnet18", insert=Adapters()), {}, torch.randn(2, 3, 32, 32)
    twin = copy.deepcopy(net)
    block = twin.backbone.layer1[0]
    block.conv1.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0]))
    twin.adapters[0].register_forward_hook(lambda module, inputs, output: seen.update(got=inputs[0], gave=output))
    block.bn1.register_forward_pre_hook(lambda module, inputs: seen.update(next=inputs[0]))
    with torch.no_grad():
        twin.adapters[0].conv.weight.add_(1.0)
        assert not torch.equal(twin.eval()(x), net.eval()(x))
        assert torch.equal(seen["got"], nn.functional.conv2d(seen["x"], block.conv1.weight, padding=1))
    assert torch.equal(seen["next"], seen["gave"])
    assert not torch.equal(seen["got"], seen["gave"])
