"""Backbones: reference sizes, image sizes, seeds, the places of stages and maps, and kernels without needless taps."""

import pytest
import torch
from networks import build, make, outline, shapes
from torch import nn

from fedsim.models.narrow import NarrowConv2d, narrow
from fedsim.models.norms import XAN, BatchNorm
from fedsim.models.norms.placement import batch_norm_paths
from fedsim.tensors.kinds import Kind, bn_scope, tensor_kinds


@pytest.mark.parametrize(("backbone", "settings", "trainable", "layers", "channels", "entries"), [
    ("resnet18", {}, 11_176_512 + 7 * 513, 20, 4_800, 122),
    ("resnet50", {}, 23_508_032 + 7 * 2049, 53, 26_560, 320),
    ("densenet121", {}, 6_953_856 + 7 * 1025, 121, 41_824, 120 + 5 * 121 + 2),
    ("resnet18", {"bottleneck": 256}, 11_310_151, 21, 4_800 + 256, 129),  # FedIG's network
])  # fmt: skip
def test_reference_sizes(backbone, settings, trainable, layers, channels, entries):
    net = outline(backbone, **settings)
    kinds, state = tensor_kinds(net), net.state_dict()
    assert sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad) == trainable
    assert sum(state[name].numel() for name, kind in kinds.items() if kind is Kind.BN_STATISTICS) == 2 * channels
    assert sum(kind is Kind.COUNTER for kind in kinds.values()) == layers
    assert (len(bn_scope(net)), len(state)) == (5 * layers, entries)
    assert bn_scope(net, "xan") == []


@pytest.mark.parametrize(("backbone", "size", "levels"), [  # (channels, side) of each level
    *(("resnet18", size, [(128, a), (256, b), (512, c)]) for size, a, b, c in ((28, 4, 2, 1), (65, 9, 5, 3))),
    *(("digits-cnn-bn", size, [(10, a), (20, b)]) for size, a, b in ((28, 12, 4), (65, 30, 13))),
    *(("alexnet", size, [(384, a), (256, a), (256, b)]) for size, a, b in ((62, 4, 2), (63, 3, 1), (224, 13, 6))),
    ("densenet121", 31, [(512, 4), (1024, 2), (1024, 1)]), ("resnet50", 28, [(512, 4), (1024, 2), (2048, 1)]),
    ("vit-b-32", 32, []),
])  # fmt: skip
def test_levels_and_features_at_many_sizes(backbone, size, levels):
    for channels in (1, 3) if "digits" in backbone else (1,):
        net = outline(backbone, size=size, channels=channels)
        maps = [(width, side, side) for width, side in levels]
        assert shapes(net, 2, channels, size, size) == [*maps, (2, net.feature_dim), (2, 7)]


@pytest.mark.parametrize(("name", "dim", "levels", "norms", "stem"), [  # levels: path and width
    ("tf_efficientnet_lite0", 1280, {"blocks.2": 40, "blocks.4": 112, "blocks.6": 320}, 49, 3),
    ("resnet18", 512, {"layer2": 128, "layer3": 256, "layer4": 512}, 20, 1),
    ("convnext_atto", 320, {"stages.1": 80, "stages.2": 160, "stages.3": 320}, 0, 0),
    ("vit_tiny_patch16_224", 192, {}, 0, 0),
])  # fmt: skip
def test_layout_of_timms_models(name, dim, levels, norms, stem):
    """Levels are maps at 1/8, 1/16 and 1/32 of the image; every batch norm is in one stage or in the stem."""
    net = outline(f"timm:{name}", size=64)
    assert list(net.levels) == [f"backbone.{path}" for path in levels]
    maps = [(width, side, side) for width, side in zip(levels.values(), (8, 4, 2))]
    assert shapes(net, 1, 3, 64, 64) == [*maps, (1, dim), (1, 7)]
    stages = [batch_norm_paths(net, [stage], stem=False) for stage in net.stages]
    first = batch_norm_paths(net, [], stem=True)
    assert (len(batch_norm_paths(net)), len(first)) == (norms, stem)
    assert sorted(sum(stages, first)) == sorted(batch_norm_paths(net))


def test_grayscale_equals_repeated_channels():
    x = torch.randn(2, 1, 32, 32)
    expected = build("resnet18").eval()(x.repeat(1, 3, 1, 1))
    torch.testing.assert_close(build("resnet18", channels=1).eval()(x), expected)


def test_the_seed_alone_says_the_initial_weights():
    """Norm parts change none of them, and the global generator stays as it is."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, same, other = make("digits-cnn-bn"), make("digits-cnn-bn", BatchNorm()), make("digits-cnn-bn", seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in first.state_dict().items())
    assert not torch.equal(first.head.weight, other.head.weight)
    assert torch.equal(make("digits-cnn-bn", XAN()).backbone.conv2.weight, first.backbone.conv2.weight)


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (3, 1), (7, 7)])
@pytest.mark.parametrize("kernel", [5, 7])
def test_narrow_kernels_give_the_same_and_others_stay(size, kernel):
    torch.manual_seed(0)
    own = nn.Conv2d(16, 16, kernel, padding=kernel // 2, groups=16, bias=False).to(memory_format=torch.channels_last)
    x = torch.randn(4, 16, *size).contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = own(x)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, own.weight), gradient)
    narrow(own)
    assert type(own) is NarrowConv2d
    found = own(x)
    assert torch.equal(found, expected)
    for ours, theirs in zip(torch.autograd.grad(found, (x, own.weight), gradient), wanted):
        assert torch.allclose(ours, theirs, atol=1e-6)
    for change in ({"groups": 1}, {"stride": 2}, {"padding": 0}, {"dilation": 2}, {"padding_mode": "reflect"}):
        other = nn.Conv2d(16, 16, **{"kernel_size": kernel, "padding": kernel // 2, "groups": 16, **change})
        narrow(other)
        assert type(other) is nn.Conv2d
