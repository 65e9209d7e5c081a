"""Layers of normalization in the form for devices that start each operation slowly: numbers, gradients, launches."""

import contextlib
import copy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedsim.models.norms import MixIG, branches, mixture
from fedsim.models.norms.adapter import Adapter
from fedsim.models.norms.bin import BINLayer
from fedsim.models.norms.mixig import MixIGLayer, switched
from fedsim.models.norms.mixture import Mixture
from fedsim.models.norms.moments import plain_moments, prefers_few
from fedsim.models.norms.xan import XANLayer
from fedsim.runs.serve import serve
from fedsim.runtime.launch import make_grid
from fedsim.testing.contract import small_plan
from fedsim.testing.other_device import OTHER, other_device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REFERENCE = torch.tensor([[0.5, -1.0, 2.0], [1.0, 2.0, 0.5]], dtype=torch.float64)
close = torch.testing.assert_close
# The launches of one layer, forward and backward, which is at most half of those of the formula in autograd's own
# operations: XAN 39, BIN 83, and MixIG 54 mixed and 88 adapted. A batch norm has 3.
LAUNCHES = {"BatchNorm2d": 3, "XAN": 16, "BIN": 18, "MixIG, mixed": 21, "MixIG, adapted": 40}


def drawn(*shape, seed=3):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mixture_of(kind, eps=1e-3):
    """A rule and its tensors for maps of three channels. Of the values of u one is above 1 and one below 0."""
    gamma, beta = drawn(3, seed=4).abs() + 0.5, drawn(3, seed=5)
    if kind == "u":
        u = torch.tensor([0.3, 1.1, -0.1], dtype=torch.float64)
        return Mixture(eps, REFERENCE, u, has_floor=True), [gamma, beta]
    adapter = Adapter(3, 4).double()
    nn.init.normal_(adapter.fc2.weight, std=0.1, generator=torch.Generator().manual_seed(6))
    nn.init.normal_(adapter.fc1.weight, std=0.3, generator=torch.Generator().manual_seed(7))
    weights = [weight.detach() for weight in adapter.weights()]
    return Mixture(eps, REFERENCE, z=torch.tensor([0.5, -30.0, 0.2, 30.0], dtype=torch.float64)), [
        gamma,
        beta,
        *weights,
    ]


@pytest.fixture
def few(monkeypatch):
    """MixIG's and XAN's layers take the form for a GPU on this CPU too."""
    monkeypatch.setattr(mixture, "prefers_few", lambda x: torch.is_grad_enabled())
    monkeypatch.setattr(branches, "starts_slowly", lambda x: True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["u", "alpha"])
def test_the_gradients_are_those_of_numerical_differences(kind, layout, few):
    rule, tensors = mixture_of(kind)
    x = drawn(4, 3, 2, 3).contiguous(memory_format=layout).requires_grad_()
    leaves = [tensor.requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(rule.normalized, (x, *leaves))
    assert torch.autograd.gradgradcheck(rule.normalized, (x, *leaves))
    if kind == "alpha":
        assert sorted(rule.alpha.tolist())[::3] == [0.0, 1.0]  # at the bounds alpha has no gradient
        assert (rule.alpha[[0, 2]] > 0).all()
        assert (rule.alpha[[0, 2]] < 1).all()


@pytest.mark.parametrize("trained", [(0, 1), (0, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5), (1,)])
@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("kind", ["u", "alpha"])
def test_both_forms_give_the_same(kind, smallest, trained, monkeypatch):
    """Also where a standard deviation is at its smallest value, and where only some of the tensors are trained."""
    weight, results = drawn(4, 3, 4, 4, seed=8), []
    for form in (False, True):
        monkeypatch.setattr(mixture, "prefers_few", lambda x, form=form: form)
        rule, tensors = mixture_of(kind, eps=1e-12)
        x = drawn(4, 3, 4, 4) * (1e-4 if smallest else 1.0)
        if kind == "u" and smallest:
            rule.reference = rule.reference * torch.tensor([[1.0], [1e-4]])
        leaves = [x.requires_grad_(), *(tensors[i].requires_grad_(i in trained) for i in range(len(tensors)))]
        y = rule.normalized(*leaves)
        (y * weight).sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves), rule.alpha])
        if kind == "u":
            slope = rule(x.mean((2, 3)), x.var((2, 3), correction=0), *tensors)[0]
            assert bool((slope == tensors[0] / mixture.SMALLEST_STD).any()) == smallest
    for formula, few in zip(*results, strict=True):
        assert (formula is None) == (few is None)
        if formula is not None:
            close(few, formula)


def test_one_channel_by_hand(few):
    """x = (1, 3): m = 2, s = 1. r = (0, 3) and w = 1/4: mu = .5, sigma = 2.5; gamma = 5 makes a = 2, y = (1, 5) + beta.

    With g = (1, 0): G = 1, S = 1/2, D = (1, 1/5) = dL/d(beta, gamma), n = (2, 2/5), e = (-1/4, -1/20), k = -1/20 and
    dL/dx = 2 (1, 0) - (1, 3)/20 - 1/4 + 2/20 = (1.8, -.3).
    """
    x = torch.tensor([1.0, 3.0]).view(1, 1, 1, 2).requires_grad_()
    gamma, beta = torch.tensor([5.0], requires_grad=True), torch.tensor([7.0], requires_grad=True)
    rule = Mixture(0.0, torch.tensor([[0.0], [3.0]]), u=torch.tensor([0.25]))
    y = rule.normalized(x, gamma, beta)
    close(y.flatten(), torch.tensor([8.0, 12.0]))
    y[..., 0].sum().backward()
    close(x.grad.flatten(), torch.tensor([1.8, -0.3]))
    assert (gamma.grad.item(), beta.grad.item()) == pytest.approx((0.2, 1.0))


def test_half_precision_and_large_offsets(few, images):
    layer = MixIGLayer(nn.BatchNorm2d(4), MixIG()).train()
    layer.fresh, layer.u = False, torch.full((4,), 0.5)
    with switched({"": layer}, "mixed"):
        half = layer(images.bfloat16().requires_grad_())
        assert half.dtype == torch.bfloat16
        close(half.float(), layer(images.bfloat16().float()), atol=2e-2, rtol=1e-2)
        double = copy.deepcopy(layer).double()
        double.u = layer.u.double()
        with switched({"": double}, "mixed"):
            close(layer(images + 1000).double(), double(images.double() + 1000), atol=2e-3, rtol=1e-5)


def test_where_the_few_operations_are_used():
    here, there = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2, device=OTHER)
    assert prefers_few(there)
    assert not prefers_few(here)
    with plain_moments():
        assert not prefers_few(there)
    with torch.no_grad():
        assert not prefers_few(there)


@pytest.mark.parametrize("make", [XANLayer, lambda bn: XANLayer(bn, "free"), BINLayer])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tracks", [True, False])
def test_branches_give_the_same_as_the_formula(trained_bn, images, tracks, momentum, training, make, monkeypatch):
    trained_bn.momentum, trained_bn.track_running_stats = momentum, tracks
    layer, weight, results = make(trained_bn).double().train(training), torch.randn(images.shape).double(), []
    for name, value in layer.named_parameters():
        if name in ("s_in", "rho"):
            value.data.copy_(torch.linspace(0.2, 0.9, value.numel()).view_as(value))
    for form in (False, True):
        monkeypatch.setattr(branches, "starts_slowly", lambda x, form=form: form)
        each, x = copy.deepcopy(layer), images.double().requires_grad_()
        (each(x) * weight).sum().backward()
        results.append((x.grad, *(p.grad for p in each.parameters()), *each.buffers()))
    for formula, sum_of_branches in zip(*results, strict=True):
        close(sum_of_branches, formula)


def test_branches_in_half_precision(few, trained_bn, images):
    for layer in (XANLayer(copy.deepcopy(trained_bn)), BINLayer(copy.deepcopy(trained_bn))):
        y = layer(images.bfloat16())
        assert y.dtype == torch.bfloat16
        close(y.float(), copy.deepcopy(layer)(images), atol=6e-2, rtol=3e-2)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_starts_no_more_operations_than_it_did(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from launches import layer_launches

    with other_device():
        assert layer_launches(name, OTHER).parts.total() <= LAUNCHES[name]


@pytest.mark.parametrize("method", ["fedig-a", "gperxan"])
def test_a_run_on_another_device_gives_the_losses_of_one_here(method, tmp_path):
    """From its second round on, layers have global statistics, so that the few operations are used."""
    words, losses = ["train.rounds=2", "train.iterations=2", "data.image_size=28"], []
    for place in (contextlib.nullcontext, other_device):
        with place():
            plan = small_plan(method, tmp_path / place.__name__, words)
            records = pd.read_csv(serve(make_grid(plan), plan) / "clients.csv")
        losses.append(records.filter(like="loss").to_numpy())
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
