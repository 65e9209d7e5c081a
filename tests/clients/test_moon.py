"""MOON, and its projection head."""

import math

import pytest
import torch
from small_round import colour_images, small_data, small_round
from support import numbers, run_small, small_experiment
from torch import nn

from clients.parts import Batch
from clients.terms.moon import PREVIOUS, ModelContrast, contrast
from fedsim.models import build_model
from fedsim.models.inserts.projection_head import ProjectionHead
from fedsim.settings import ModelSettings


def test_contrast_numbers():
    """log(1 + e^-2); log 2 and no gradient for equal similarities; the length of z does not matter."""
    z = torch.tensor([[1.0, 0.0]], requires_grad=True)
    previous = torch.tensor([[0.0, 1.0]])
    assert contrast(z, z.detach(), previous, 0.5).item() == pytest.approx(0.126928, abs=1e-6)
    equal = contrast(z, previous, previous, 0.5)
    equal.backward()
    assert equal.item() == pytest.approx(math.log(2), abs=1e-6)
    assert z.grad.abs().max() == 0
    torch.manual_seed(0)
    a, b, c = (torch.randn(5, 4) for _ in range(3))
    assert contrast(7 * a, b, c, 0.5).item() == pytest.approx(contrast(a, b, c, 0.5).item(), abs=1e-6)


def test_contrast_is_the_papers_formula():
    """The mean of -log( e^(s/T) / (e^(s/T) + e^(p/T)) ) over the batch, even when the exponentials would overflow."""
    torch.manual_seed(0)
    z, g, p = (torch.randn(6, 3, dtype=torch.float64) for _ in range(3))
    near, far = (torch.exp(torch.cosine_similarity(z, other) / 0.5) for other in (g, p))
    expected = -(near / (near + far)).log().mean()
    assert contrast(z, g, p, 0.5).item() == pytest.approx(expected.item(), abs=1e-6)
    assert math.isfinite(contrast(z, g, p, 1e-4).item())


def test_reference_models_are_frozen():
    """z has gradients only through the trained network; in round 1 the previous model is the received one."""
    torch.manual_seed(0)
    net = build_model(ModelSettings(backbone="digits-cnn-bn", bottleneck=8), 3, 1, 28, None, 0).train()
    round = small_round(small_data(colour_images(6)), net=net, steps=1)
    part = ModelContrast(mu=2.0)
    term = part.begin(round)
    statistics = {name: value.clone() for name, value in net.named_buffers()}
    images = torch.rand(6, 1, 28, 28)
    batch = Batch(images, torch.arange(6) % 3)
    assert term(Batch(images, batch.labels, features=net.features(images))).item() == pytest.approx(2 * math.log(2))
    net.load_state_dict({**net.state_dict(), **statistics})
    part.end(round)
    round.store.commit()
    round.store.open_round(2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    term = ModelContrast(mu=2.0).begin(round)
    round.forward(batch)
    term(batch).backward()
    assert all(parameter.grad is not None for name, parameter in net.named_parameters() if not name.startswith("head"))
    assert net.head.weight.grad is None
    kept = round.store.get(PREVIOUS)
    assert kept.keys() == net.state_dict().keys()
    assert not kept["head.weight"].equal(net.head.weight)


def test_mu_zero_is_fedavg(tmp_path):
    """The whole row without its head: there is no term and no stored model, and numbers are FedAvg's."""
    off = {"name": "moon", "model_contrast": {"mu": 0.0}, "inserts": "none"}
    moon, _ = run_small(small_experiment(tmp_path / "a", off))
    plain, _ = run_small(small_experiment(tmp_path / "b"))
    columns = ["train_loss", "target_accuracy", "target_loss", "bytes_up"]
    assert numbers(moon / "rounds.csv")[columns].equals(numbers(plain / "rounds.csv")[columns])
    round = small_round(small_data(colour_images(4)), net=nn.Linear(1, 1))
    ModelContrast(mu=0.0).end(round)
    assert round.store.commit() == 0


def test_projection_head():
    """It is d - d - 256 before the classifier; a bottleneck is used instead, unless the head is always wanted."""
    plain = ModelSettings(backbone="digits-cnn-bn")
    net = build_model(plain, 10, 1, 28, None, 0)
    d = net.feature_dim
    ProjectionHead().apply(net)
    assert [tuple(p.shape) for p in net.bottleneck.parameters()] == [(d, d), (d,), (256, d), (256,)]
    assert (net.feature_dim, net.head.in_features, net.head.out_features) == (256, 256, 10)
    assert net(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    narrow = build_model(ModelSettings(backbone="digits-cnn-bn", bottleneck=8), 10, 1, 28, None, 0)
    names = list(narrow.state_dict())
    ProjectionHead().apply(narrow)
    assert list(narrow.state_dict()) == names
    ProjectionHead(width=5, always=True).apply(narrow)
    assert narrow.features(torch.rand(2, 1, 28, 28)).shape == (2, 5)
