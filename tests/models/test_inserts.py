"""Adapters, the feature highlighter, MixStyle and the exploration of styles: numbers by hand, and properties."""

import copy
import math

import pytest
import torch
from networks import build, outline
from torch import nn

from fedsim.models.inserts import mixstyle
from fedsim.models.inserts.adapters import Adapter, Adapters, MapDropout
from fedsim.models.inserts.feature_highlighter import WIDTH, FeatureHighlighter, Highlighter
from fedsim.models.inserts.mixstyle import MixStyle, MixStyleLayer, mix_styles, moved_style
from fedsim.models.inserts.style_exploration import (
    StyleExploration,
    centres,
    diverse,
    explored_styles,
    in_style,
    mixed,
    moments,
    shared_styles,
    style_of,
)


def test_zero_adapters_and_where_adapters_lie():
    """This holds bit for bit; an initial adapter changes a normalized input by at most O(1e-3). A copy of the network
    calls its own adapters, and an adapter sees the output of its convolution."""
    adapter, x = Adapter(64, 0.3, 1e-4), torch.randn(8, 64, 4, 4)
    assert 0 < (adapter(x) - x).abs().max() < 1e-2
    nn.init.zeros_(adapter.conv.weight)
    assert torch.equal(adapter(x), x)
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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dropout_of_maps(layout, compiled):
    """Values are zero with probability p, else divided by 1 - p; in eval mode and with p = 0 nothing is changed."""
    x = torch.full((32, 10, 25, 25), 2.0).contiguous(memory_format=layout).requires_grad_()
    dropout = MapDropout(0.3)
    y = (torch.compile(dropout, backend="eager", fullgraph=True) if compiled else dropout)(x)
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


PART = FeatureHighlighter()


def identity_highlighter():
    """Queries and keys are the map itself, two channels."""
    highlighter = Highlighter(2)
    with torch.no_grad():
        highlighter.project.weight.zero_()
        highlighter.project.bias.zero_()
        for row, channel in ((0, 0), (1, 1), (WIDTH, 0), (WIDTH + 1, 1)):
            highlighter.project.weight[row, channel] = 1
    return highlighter


def attended(highlighter, maps, partners=lambda queries: queries):
    highlighter.keep(None, (), maps)
    with highlighter.paired(partners):
        return highlighter(maps.mean(dim=(2, 3)))


# Positions as (channel 0, channel 1): (1, 0), (2, 1) and (0, 2), (1, 1)
MAPS = torch.tensor([[[[1.0, 2.0]], [[0.0, 1.0]]], [[[0.0, 1.0]], [[2.0, 1.0]]]])


def test_two_samples_of_one_class():
    """T2: a = (.457057, .542943) and (.425033, .574967); each as its own partner: a = (.5, .5)."""
    found = attended(identity_highlighter(), MAPS, lambda queries: queries.flip(0))
    expected = torch.tensor([[1.5, 0.5, 1.542943, 0.542943], [0.5, 1.5, 0.574967, 1.425033]])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    alone = identity_highlighter()
    alone.keep(None, (), MAPS)
    means = MAPS.mean(dim=(2, 3))
    torch.testing.assert_close(alone(means), torch.cat([means, means], dim=1))


@pytest.mark.parametrize("backbone", ["resnet18", "densenet121"])
def test_the_attended_map_is_the_one_that_is_pooled(backbone):
    """With equal keys everywhere the attention is uniform, and both halves of the features are the means."""
    net = build(backbone, insert=PART, size=64).eval()
    torch.nn.init.zeros_(net.bottleneck.project.weight)
    torch.testing.assert_close(*net.features(torch.rand(2, 3, 64, 64)).chunk(2, dim=1), atol=1e-5, rtol=1e-5)


def test_numbers_and_gradients():
    """Two images with half of each other's style, and one with colours of another."""
    x = torch.tensor([[1.0, 3.0], [10.0, 14.0]]).view(2, 1, 1, 2)
    swapped = mix_styles(x, torch.tensor([1, 0]), torch.full((2,), 0.5))
    torch.testing.assert_close(swapped[0].flatten(), torch.tensor([5.5, 8.5]), atol=1e-5, rtol=0)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 2, 2)
    other = torch.full((1, 1, 1, 1), 10.0), torch.full((1, 1, 1, 1), 2.0)
    for lam, wanted in ((0.25, [6.007158, 7.419053, 8.830947, 10.242842]), (1.0, [1.0, 2.0, 3.0, 4.0])):
        moved = moved_style(x, mixstyle.style_of(x), other, torch.tensor([lam]))
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


def column(*values):
    """One channel of as many samples, [B, 1, 1, 1]."""
    return torch.tensor(values).reshape(-1, 1, 1, 1)


def test_moments_styles_and_mixtures():
    """Means and deviations of the two samples' means 1, 3 and deviations .5, 1.5; 1e-3 for one sample. Lambda 1
    keeps every style (T5); one half is the mean of two: 1 (1 + 3)/2 + (0 + 4)/2 = 4."""
    mean, std = moments(torch.tensor([[[[1.0, 3.0]], [[2.0, 2.0]]]]))
    assert mean.flatten().tolist() == [2, 2]
    assert std.flatten().tolist() == pytest.approx([math.sqrt(2 + 1e-6), 1e-3])
    style = style_of(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.5], [1.5]]))
    assert style.shape == (4, 1)
    assert style.flatten().tolist() == pytest.approx([2, 1, math.sqrt(2), math.sqrt(0.5)], rel=1e-5)
    assert style_of(torch.ones(1, 3), torch.ones(1, 3))[2:].flatten().tolist() == pytest.approx([1e-3] * 6)
    content, mean, std = column(1.0, -1.0), column(0.0, 4.0), column(1.0, 3.0)
    swap = torch.tensor([1, 0])
    assert mixed(content, mean, std, column(1.0, 1.0), swap).flatten().tolist() == [1, 1]
    assert mixed(content, mean, std, column(0.5, 0.5), swap).flatten().tolist() == [4, 0]
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    mean, std = moments(x.detach())
    assert in_style(x, mean, std).equal(x)
    other = in_style(x, mean.flip(0), 2 * std)
    torch.testing.assert_close(moments(other)[0], mean.flip(0), atol=1e-5, rtol=1e-5)
    other.sum().backward()
    assert x.grad.equal(torch.full_like(x, 2.0))  # its own moments carry no gradient


@pytest.mark.parametrize(("clamp", "lowest"), [(True, 0.0), (False, -1.0)])
def test_extrapolated_styles(clamp, lowest):
    """T1: means (1, 3), deviations (.5, 1.5), alpha 3; the released code keeps the negative deviation."""
    mean, std = explored_styles(column(1.0, 3.0), column(0.5, 1.5), torch.tensor([1, 0]), 3.0, clamp)
    assert mean.flatten().tolist() == [1, 3, 6, -2]
    assert std.flatten().tolist() == [0.5, 1.5, 3, lowest]
    mean, std = explored_styles(column(1.0, 3.0), column(0.5, 1.5), torch.tensor([1]), 0.0, clamp)
    assert (mean.flatten().tolist(), std.flatten().tolist()) == ([1, 3, 3], [0.5, 1.5, 1.5])


def test_seeds_are_far_from_each_other():
    """Without noise every seed is the row farthest from all seeds: 0, 10, 4 on a line; equal rows come last."""
    line = torch.tensor([[0.0], [4.0], [10.0], [0.0]])
    assert diverse(line, 0, torch.zeros(4, 4)).tolist() == [0, 2, 1, 3]
    drawn = torch.tensor([[0.0], [1.0], [2.0]])
    noise = -torch.rand(2000, 2, 3).log().neg().log()
    share = sum(diverse(drawn, 0, each)[1].item() == 2 for each in noise) / len(noise)
    assert share == pytest.approx(4 / 5, abs=0.03)  # squared distances 1 and 4
    # centres after one iteration: rows 0, 1 belong to seed 0, and 9, 10 to seed 10
    assert centres(torch.tensor([[0.0], [1.0], [9.0], [10.0]]), torch.tensor([0, 3])).flatten().tolist() == [0.5, 9.5]


def numbered(*means):
    """Maps [B, 1, 1, 2] with these means and deviation sqrt(2)."""
    return torch.stack([torch.tensor([[[value - 1, value + 1]]]) for value in means])


def test_shared_styles():
    """Seeds 0 and 10 keep their styles; the others get mean 5 + 1 * 2 and deviation max(3 - 4 * 1, 0) = 0."""
    x = numbered(0.0, 10.0, 0.1, 0.2)
    foreign = torch.tensor([[5.0], [3.0], [2.0], [1.0]])
    normal = torch.stack([torch.ones(4, 1), torch.full((4, 1), -4.0)])
    found = shared_styles(x, foreign, 0, torch.zeros(2, 4), normal)
    assert found[:2].equal(x[:2])
    assert found[2:].flatten().tolist() == pytest.approx([7] * 4)
    mean, std = moments(shared_styles(x, foreign, 0, torch.zeros(2, 4), 0 * normal))
    torch.testing.assert_close(mean.flatten(), torch.tensor([0.0, 10.0, 5.0, 5.0]))
    torch.testing.assert_close(std.flatten()[2:], torch.full((2,), 3.0))
    # As in the released code, the first half gets the centres of the seeds 0 and 10 in their order, 0.1 and 10.
    x = numbered(0.2, 0.1, 0.0, 10.0)
    found = shared_styles(x, foreign, 2, torch.zeros(2, 4), torch.zeros(2, 4, 1), official=True)
    torch.testing.assert_close(moments(found)[0].flatten(), torch.tensor([0.1, 10.0, 5.0, 5.0]))


def test_in_a_network():
    """Layers after stage 1 and the explored stages, inert but inside `acting`, without entries in the state."""
    plain, net = build("resnet18"), build("resnet18")
    StyleExploration(stages=(2, 3)).apply(net)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert (net.styles.stages, net.styles.explored, net.styles.channels) == ([1, 2, 3], [2, 3], 64)
    x, seen = torch.randn(4, 3, 32, 32), []
    with net.styles.acting(lambda stage, y: seen.append((stage, y.shape[1])) or y):
        assert net.train()(x).equal(plain.train()(x))
    assert seen == [(1, 64), (2, 128), (3, 256)]
    twin = copy.deepcopy(net)  # its hooks act on its own layers
    with net.styles.acting(lambda stage, y: 0 * y):
        assert not net.eval()(x).equal(twin.eval()(x))
    assert net(x).equal(twin(x))
