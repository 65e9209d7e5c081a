"""Kernels without the taps that reach no pixel: the same values and gradients, to the bit."""

import pytest
import torch
from torch import nn

from fedsim.models.narrow import NarrowConv2d, narrow


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (3, 1), (7, 7)])
@pytest.mark.parametrize("kernel", [5, 7])
def test_values_and_gradients_are_the_same(size, kernel):
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


def test_only_what_may_be_narrowed_is():
    """Not small, strided, unpadded, dilated or mirrored kernels, nor any that are not depthwise."""
    changes = ({}, {"groups": 1}, {"kernel_size": 3, "padding": 1}, {"stride": 2}, {"padding": 0}, {"dilation": 2},
               {"padding_mode": "reflect"})  # fmt: skip
    depthwise = {"kernel_size": 5, "padding": 2, "groups": 8}
    convolutions = nn.Sequential(*(nn.Conv2d(8, 8, **{**depthwise, **change}) for change in changes))
    names = list(convolutions.state_dict())
    narrow(convolutions)
    assert [type(module) is NarrowConv2d for module in convolutions] == [True] + 6 * [False]
    assert list(convolutions.state_dict()) == names
