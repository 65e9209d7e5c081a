"""PerAda's adapters."""

import copy

import pytest
import torch
from support import small_experiment
from torch import nn

from clients.tools.networks import freeze
from fedsim.common.errors import UserError
from fedsim.models import build_model
from fedsim.models.inserts.adapters import Adapter, Adapters, MapDropout
from fedsim.run.plan import resolve
from fedsim.settings import ModelSettings


def network(backbone="resnet18", classes=7, part=None, size=32):
    """A network with adapters in it."""
    torch.manual_seed(0)
    net = build_model(ModelSettings(backbone=backbone), classes, 3, size, None, 0)
    (part or Adapters()).apply(net)
    return net


def test_adapter_with_zero_weights_is_the_identity():
    """This holds bit for bit; an initial adapter changes a normalized input by at most O(1e-3)."""
    torch.manual_seed(0)
    adapter, x = Adapter(64, 0.3, 1e-4), torch.randn(8, 64, 4, 4)
    moved = (adapter(x) - x).abs().max().item()
    assert 0 < moved < 1e-2
    nn.init.zeros_(adapter.conv.weight)
    assert torch.equal(adapter(x), x)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dropout_of_maps(layout):
    """Values are zero with probability p, else divided by 1 - p, in both memory layouts.

    In eval mode and with p = 0 nothing is changed.
    """
    torch.manual_seed(0)
    x = torch.full((32, 10, 25, 25), 2.0).contiguous(memory_format=layout).requires_grad_()
    dropout = MapDropout(0.3)
    y = dropout(x)
    zeros = y == 0
    assert zeros.float().mean().item() == pytest.approx(0.3, abs=0.005)  # 4.9 standard deviations
    assert torch.allclose(y[~zeros], torch.tensor(2 / 0.7))
    y.sum().backward()
    assert torch.equal(x.grad == 0, zeros)
    per_image = zeros.float().mean((1, 2, 3))
    assert per_image.std() < 0.02
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(MapDropout(0.0)(x), x)


@pytest.mark.parametrize(("classes", "count"), [(7, 1_411_719), (10, 1_413_258), (65, 1_441_473)])
def test_trained_parameters_of_resnet18(classes, count):
    """7.4: the number of parameters that are trained and exchanged; 15,488 running statistics are exchanged too."""
    net = network(classes=classes)
    trained = {name: value for name, value in net.named_parameters() if name not in net.frozen}
    assert sum(value.numel() for value in trained.values()) == count
    assert sum(value.numel() for name, value in trained.items() if name.startswith("adapters.")) == 1_400_320
    statistics = [value for name, value in net.named_buffers() if name not in net.frozen and value.is_floating_point()]
    assert sum(value.numel() for value in statistics) == 15_488


def test_frozen_backbone_does_not_move():
    """A training step does not change weights and statistics of the backbone, including its shortcuts."""
    net = network()
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
    net = network()
    twin = copy.deepcopy(net)
    seen = []
    twin.adapters[0].register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    after = []
    twin.backbone.layer1[0].conv1.register_forward_hook(lambda module, inputs, output: after.append(output))
    twin.backbone.layer1[0].bn1.register_forward_pre_hook(lambda module, inputs: after.append(inputs[0]))
    with torch.no_grad():
        twin.adapters[0].conv.weight.add_(1.0)
        twin.eval()(torch.randn(2, 3, 32, 32))
        assert not torch.equal(twin(torch.ones(1, 3, 32, 32)), net.eval()(torch.ones(1, 3, 32, 32)))
    assert torch.equal(after[1], seen[0][1])
    assert not torch.equal(seen[0][0], seen[0][1])


@pytest.mark.parametrize(("backbone", "count"), [("digits-cnn-bn", 1), ("resnet50", 16)])
def test_other_backbones_have_one_a_block(backbone, count):
    """It is after the last norm of each block; a network without batch norm is refused in one line."""
    assert len(network(backbone).adapters) == count
    with pytest.raises(UserError, match="no blocks with batch norm"):
        network("digits-cnn")


@pytest.mark.parametrize("norm", ["xan", "bin", "mix_ig", "ibn", "dson"])
def test_other_norms_are_refused(norm):
    """A layer that another norm makes would not call its adapter; the refusal names the norm in one line."""
    with pytest.raises(
        UserError, match=f"norm layers are those of the backbone, which does not hold with {norm}"
    ) as no:
        resolve(small_experiment("unused", {"name": "perada", "norm": norm}))
    assert "\n" not in str(no.value)
    assert resolve(small_experiment("unused", {"name": "perada", "norm": "batch_norm"})).recipe.inserts == (Adapters(),)


def test_nothing_is_frozen_on_request():
    """With `freeze = false` nothing is frozen."""
    assert network(part=Adapters(freeze=False)).frozen == frozenset()
