"""Kernels without the taps that reach no pixel: the same values and gradients, to the bit."""

import pytest
import torch
from torch import nn

from fedsim.models.narrow import NarrowConv2d, narrow


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (2, 5), (3, 1), (4, 4), (7, 7)])
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
    convolutions = nn.ModuleDict({
        "yes": nn.Conv2d(8, 8, 5, padding=2, groups=8),
        "not depthwise": nn.Conv2d(8, 8, 5, padding=2),
        "small": nn.Conv2d(8, 8, 3, padding=1, groups=8),
        "strided": nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8),
        "unpadded": nn.Conv2d(8, 8, 5, groups=8),
        "dilated": nn.Conv2d(8, 8, 5, padding=2, dilation=2, groups=8),
        "mirrored": nn.Conv2d(8, 8, 5, padding=2, groups=8, padding_mode="reflect"),
    })  # fmt: skip
    names = list(convolutions.state_dict())
    narrow(convolutions)
    assert [name for name, module in convolutions.items() if type(module) is NarrowConv2d] == ["yes"]
    assert list(convolutions.state_dict()) == names
