"""Convolutions in bfloat16 on a processor: no gradient is what was in memory before."""

import copy

import pytest
import torch
from support import small_experiment
from torch import nn

from fedsim.models.blind_taps import WidenedConv2d, widen_convolutions
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import close_workspaces, workspace

CASES = [  # kernel, stride, padding, dilation, height, width
    (3, 2, 1, 1, 2, 2), (3, 2, 1, 1, 1, 1), (3, 1, 1, 1, 1, 5), (3, 1, 1, 1, 5, 1), (5, 1, 2, 1, 1, 1),
    (5, 1, 2, 1, 2, 1), (7, 2, 3, 1, 1, 1), (7, 2, 3, 1, 3, 4), (3, 1, 2, 2, 1, 2),
    (3, 3, 1, 1, 1, 1), ((3, 1), (2, 1), (1, 0), 1, 1, 4),
]  # fmt: skip


def gradients(conv, x):
    """(output, gradient of the weights, gradient of the maps) of a sum with fixed factors."""
    x = x.clone().requires_grad_()
    out = conv(x)
    factors = torch.linspace(-1, 1, out.numel(), dtype=x.dtype).reshape(out.shape)
    weight, maps = torch.autograd.grad((out.to(x.dtype) * factors).sum(), [conv.weight, x])
    return out.detach(), weight, maps


@pytest.mark.parametrize("case", CASES)
def test_a_widened_convolution_is_the_same_function(case):
    kernel, stride, padding, dilation, height, width = case
    conv = nn.Conv2d(2, 3, kernel, stride, padding, dilation).double()
    wide = copy.deepcopy(conv)
    widen_convolutions(wide)
    assert type(wide) is WidenedConv2d
    assert wide.has_blind_tap(0, height) or wide.has_blind_tap(1, width)
    x = torch.rand(2, 2, height, width, dtype=torch.float64)
    for found, expected in zip(gradients(wide, x), gradients(conv, x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_no_tap_of_the_widened_maps_is_blind(case, monkeypatch):
    kernel, stride, padding, dilation, height, width = case
    conv, shapes = WidenedConv2d(1, 1, kernel, stride, padding, dilation), []
    forward = nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda conv, x: (shapes.append(x.shape[2:]), forward(conv, x))[1])
    conv(torch.rand(1, 1, height, width))
    ((rows, columns),) = shapes
    assert not conv.has_blind_tap(0, rows)
    assert not conv.has_blind_tap(1, columns)


@pytest.mark.parametrize("case", [(3, 2, 1, 4), (3, 1, 1, 2), (7, 2, 3, 7), (1, 1, 0, 1), (3, 2, 1, 3)])
def test_maps_that_every_tap_sees_are_left_alone(case):
    kernel, stride, padding, size = case
    conv = WidenedConv2d(1, 1, kernel, stride, padding)
    assert not conv.has_blind_tap(0, size)


@pytest.mark.parametrize(("kind", "axes"), [(nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)])
def test_no_gradient_is_left_as_it_was_in_memory(kind, axes):
    """Where a processor has bfloat16 of its own, this failed for most batches without the widened convolution."""
    conv = kind(64, 128, 3, 2, 1, bias=False)
    widen_convolutions(conv)
    middle = (slice(None), slice(None), *[1] * axes)
    for images in range(1, 9):
        x = torch.rand(images, 64, *[1] * axes)
        for _ in range(2):
            torch.full((2, *conv.weight.shape), 1e30)  # is freed at once, and the gradient may get its memory
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, weight, _ = gradients(conv, x)
            assert weight.abs().max() < 1e3
            weight[middle] = 0
            assert not weight.any()


@pytest.mark.parametrize("case", CASES)
def test_a_widened_convolution_of_signals_and_volumes_is_the_same_function(case):
    kernel, stride, padding, dilation, _, length = case
    if isinstance(kernel, tuple):
        kernel, stride, padding = kernel[0], stride[0], padding[0]
    signals = nn.Conv1d(2, 3, kernel, stride, padding, dilation).double()
    volumes = nn.Conv3d(2, 3, kernel, stride, padding, dilation).double()
    for conv, sizes in ((signals, (length,)), (volumes, (1, length, 2))):
        wide = copy.deepcopy(conv)
        widen_convolutions(wide)
        assert type(wide) is not type(conv)
        x = torch.rand(2, 2, *sizes, dtype=torch.float64)
        for value, expected in zip(gradients(wide, x), gradients(conv, x), strict=True):
            torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(("precision", "kind"), [("bf16", WidenedConv2d), ("fp32", nn.Conv2d)])
def test_a_run_in_bfloat16_on_a_processor_has_them(tmp_path, precision, kind):
    plan = resolve(small_experiment(tmp_path, train={"precision": precision}, run={"device": "cpu"}))
    try:
        kinds = {type(module) for module in workspace(plan.experiment.toml()).net.modules()}
    finally:
        close_workspaces()
    assert kind in kinds
    assert not kinds & ({WidenedConv2d, nn.Conv2d} - {kind})
