"""Styles of maps: numbers worked out by hand, and properties. The pass that draws them is tested with its step."""

import copy
import math

import pytest
import torch
from networks import build

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


@pytest.mark.parametrize(("clamp", "lowest"), [(True, 0.0), (False, -1.0)])
def test_extrapolated_styles(clamp, lowest):
    """T1: means (1, 3), deviations (.5, 1.5), alpha 3; the released code keeps the negative deviation."""
    mean, std = explored_styles(column(1.0, 3.0), column(0.5, 1.5), torch.tensor([1, 0]), 3.0, clamp)
    assert mean.flatten().tolist() == [1, 3, 6, -2]
    assert std.flatten().tolist() == [0.5, 1.5, 3, lowest]
    mean, std = explored_styles(column(1.0, 3.0), column(0.5, 1.5), torch.tensor([1]), 0.0, clamp)
    assert (mean.flatten().tolist(), std.flatten().tolist()) == ([1, 3, 3], [0.5, 1.5, 1.5])


def test_a_map_in_its_own_style_is_itself():
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    mean, std = moments(x.detach())
    assert in_style(x, mean, std).equal(x)
    other = in_style(x, mean.flip(0), 2 * std)
    torch.testing.assert_close(moments(other)[0], mean.flip(0), atol=1e-5, rtol=1e-5)
    other.sum().backward()
    assert x.grad.equal(torch.full_like(x, 2.0))  # its own moments carry no gradient


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
    assert ([layer.stage for layer in net.styles], net.styles.explored, net.styles.channels) == ([1, 2, 3], [2, 3], 64)
    x, seen = torch.randn(4, 3, 32, 32), []
    with net.styles.acting(lambda stage, y: seen.append((stage, y.shape[1])) or y):
        assert net.train()(x).equal(plain.train()(x))
    assert seen == [(1, 64), (2, 128), (3, 256)]
    twin = copy.deepcopy(net)  # its hooks act on its own layers
    with net.styles.acting(lambda stage, y: 0 * y):
        assert not net.eval()(x).equal(twin.eval()(x))
    assert net(x).equal(twin(x))
