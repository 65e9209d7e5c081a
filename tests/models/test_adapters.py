"""PerAda's adapters."""

import copy

import pytest
import torch
from networks import build, outline
from support import small_experiment
from torch import nn

from clients.tools.networks import freeze
from fedsim.common.errors import UserError
from fedsim.models.inserts.adapters import Adapter, Adapters, MapDropout
from fedsim.run.plan import resolve


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
    assert torch.allclose(y[~zeros], torch.tensor(2 / 0.7))
    y.sum().backward()
    assert torch.equal(x.grad == 0, zeros)
    assert zeros.float().mean((1, 2, 3)).std() < 0.02
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(MapDropout(0.0)(x), x)


def test_trained_parameters_of_resnet18():
    """7.4: what is trained and exchanged, with 513 for each of 7 classes; running statistics are exchanged too."""
    net = outline("resnet18", insert=Adapters())
    trained = {name: value for name, value in net.named_parameters() if name not in net.frozen}
    assert sum(value.numel() for value in trained.values()) == 1_411_719
    assert sum(value.numel() for name, value in trained.items() if name.startswith("adapters.")) == 1_400_320
    statistics = [value for name, value in net.named_buffers() if name not in net.frozen and value.is_floating_point()]
    assert sum(value.numel() for value in statistics) == 15_488


def test_frozen_backbone_does_not_move():
    """A training step does not change weights and statistics of the backbone, including its shortcuts."""
    net = build("resnet18", insert=Adapters())
    still = freeze(net, dict.fromkeys(net.frozen, "frozen") | dict.fromkeys(net.state_dict().keys() - net.frozen, ""))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    for module in still:
        module.eval()
    optimizer = torch.optim.SGD([value for value in net.parameters() if value.requires_grad], 0.1)
    net(torch.randn(4, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    moved = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert not moved & net.frozen
    assert "backbone.layer2.0.downsample.1.running_mean" in net.frozen
    assert {"backbone.bn1.weight", "adapters.0.conv.weight", "head.weight", "adapters.15.norm.running_var"} <= moved


def test_adapters_lie_before_the_norms_of_a_residual_block():
    """A copy of the network calls its own adapters, and an adapter sees the output of its convolution."""
    net = build("resnet18", insert=Adapters())
    twin, seen = copy.deepcopy(net), {}
    block = twin.backbone.layer1[0]
    block.conv1.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0]))
    twin.adapters[0].register_forward_hook(lambda module, inputs, output: seen.update(got=inputs[0], gave=output))
    block.bn1.register_forward_pre_hook(lambda module, inputs: seen.update(next=inputs[0]))
    with torch.no_grad():
        twin.adapters[0].conv.weight.add_(1.0)
        x = torch.randn(2, 3, 32, 32)
        assert not torch.equal(twin.eval()(x), net.eval()(x))
        assert torch.equal(seen["got"], nn.functional.conv2d(seen["x"], block.conv1.weight, padding=1))
    assert torch.equal(seen["next"], seen["gave"])
    assert not torch.equal(seen["got"], seen["gave"])


def test_other_backbones_have_one_after_the_last_norm_of_each_block():
    assert [len(outline(name, insert=Adapters()).adapters) for name in ("digits-cnn-bn", "resnet50")] == [1, 16]


@pytest.mark.parametrize("norm", ["xan", "bin", "mix_ig", "ibn", "dson"])
def test_other_norms_are_refused(norm):
    """A layer that another norm makes would not call its adapter; the refusal names the norm in one line."""
    said = f"norm layers are those of the backbone, which does not hold with {norm}"
    with pytest.raises(UserError, match=said) as refused:
        resolve(small_experiment("unused", {"name": "perada", "norm": norm}))
    assert "\n" not in str(refused.value)
    assert resolve(small_experiment("unused", {"name": "perada", "norm": "batch_norm"})).recipe.inserts == (Adapters(),)
