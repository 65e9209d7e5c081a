"""Shared helpers of the model tests."""

import pytest
import torch
from networks import build
from torch import nn

from fedsim.models.norms import MixIG


@pytest.fixture(autouse=True)
def _seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def trained_bn():
    """A BatchNorm2d of 4 channels whose affine parameters and statistics are not the initial ones."""
    generator = torch.Generator().manual_seed(1)
    bn = nn.BatchNorm2d(4)
    for value in (bn.weight.data, bn.bias.data, bn.running_mean, bn.running_var):
        value.copy_(torch.rand(4, generator=generator) + 0.5)
    return bn


@pytest.fixture
def images():
    """A batch of six 4-channel maps whose instances differ in mean and scale."""
    generator = torch.Generator().manual_seed(2)
    scale, shift = torch.rand(2, 6, 4, 1, 1, generator=generator)
    return torch.randn(6, 4, 5, 3, generator=generator) * (scale + 0.2) + 3 * shift


@pytest.fixture(params=[None, MixIG()], ids=["bn", "mixig"])
def net(request):
    """A digits CNN whose statistics and affine parameters are not the initial ones."""
    net = build("digits-cnn-bn", request.param, channels=1, size=28).train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.uniform_(-0.5, 0.5)
    net(torch.rand(32, 1, 28, 28) * 2)
    return net


@pytest.fixture
def digits():
    return torch.rand(7, 1, 28, 28) * torch.rand(7, 1, 1, 1)
