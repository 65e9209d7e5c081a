"""Boundary-oriented contrast on numbers worked out by hand, and ELCFS's step with it."""

import pytest
import torch
from small_round import colour_images, small_data, small_round
from torch import nn

from clients.local_round import Batch
from clients.step.episodic import EpisodicStep
from clients.tools.contours import boundary_contrast, boundary_loss, contour_and_ring, region_means
from fedsim.models.net import Net
from fedsim.models.tasks import Segmentation

SAME = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
APART = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
GROUND = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize(("contour", "tau", "options", "expected"), [
    (SAME, 1.0, {}, 0.551445), (APART, 1.0, {}, 0.885449), (APART, 0.5, {}, 0.758885),
    (SAME, 0.05, {}, 4.12e-9),  # -log(1 / (1 + 2 e^-20))
    (SAME, 1.0, {"negatives_only": True}, -0.306853),  # -1 + log 2
])  # fmt: skip
def test_contrast(contour, tau, options, expected):
    found = boundary_contrast(contour, GROUND, tau, **options).item()
    assert found == pytest.approx(expected, rel=1e-2 if tau == 0.05 else 2e-6)


def test_contrast_needs_two_vectors_of_each_label():
    """With one vector there is no pair; the loss is a zero through which gradients can still be computed."""
    one = SAME[:1].clone().requires_grad_()
    loss = boundary_contrast(one, GROUND, 0.05)
    loss.backward()
    assert loss.item() == one.grad.abs().sum() == 0


def test_masks_of_a_square():
    """3x3 in 15x15 has a contour of 8 pixels and a ring of 100; an empty mask has neither."""
    masks = torch.zeros(1, 2, 15, 15)
    masks[0, 0, 6:9, 6:9] = 1
    contour, ring = contour_and_ring(masks)
    assert (contour.sum((2, 3)).tolist(), ring.sum((2, 3)).tolist()) == ([[8, 0]], [[100, 0]])
    assert not (ring * masks).any()


def test_region_means_are_means_over_pixels():
    """A region of two pixels, and an empty region, whose means are zeros and which is marked as empty."""
    regions = torch.zeros(1, 2, 2, 2)
    regions[0, 0, 0] = 1
    means, found = region_means(torch.arange(8.0).view(1, 2, 2, 2), regions)
    assert means.tolist() == [[[0.5, 4.5], [0.0, 0.0]]]
    assert found.tolist() == [[True, False]]


def test_structures_add_up_and_empty_ones_give_nothing():
    """Two equal structures double the loss; an empty mask is 0 and never NaN."""
    torch.manual_seed(0)
    masks = torch.zeros(2, 1, 15, 15)
    masks[:, 0, 6:9, 6:9] = 1
    raw, moved = torch.randn(2, 2, 4, 15, 15)
    one = boundary_loss(raw, moved, masks, 0.5)
    assert boundary_loss(raw, moved, masks.expand(-1, 2, -1, -1), 0.5).item() == pytest.approx(2 * one.item())
    assert boundary_loss(raw, moved, torch.zeros_like(masks), 0.5).item() == 0


def loss_and_gradient(part):
    """(gradient of one episode, the network, its images and masks): two images of noise with a square each.

    The network is smooth and in double precision; nothing foreign came, so that x' = x.
    """
    torch.manual_seed(1)
    images, masks = torch.rand(2, 1, 15, 15).double(), torch.zeros(2, 1, 15, 15, dtype=torch.uint8)
    masks[0, 0, 6:9, 6:9] = masks[1, 0, 3:8, 4:9] = 1
    net = Net(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh()), 3, 1, task=Segmentation()).double()
    round = small_round(small_data(colour_images(3)), {"amplitude": {}}, net, task=Segmentation(), classes=1)
    round.optimizer = torch.optim.SGD(net.parameters(), 0.0)
    part.begin(round)(Batch(images, masks, images, prepare=lambda images: images))
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()]), net, images, masks


@pytest.mark.parametrize(("gamma", "second_order"), [(0.0, False), (0.7, False), (0.7, True)])
def test_boundary_term_reaches_both_embeddings(gamma, second_order):
    """At beta = 0 the gradient is that of 2 L + gamma L_bd(E, E), with both orders."""
    part = EpisodicStep(gamma=gamma, beta=0.0, tau=0.5, second_order=second_order)
    found, net, images, masks = loss_and_gradient(part)
    features = net.features(images)
    loss = 2 * Segmentation().loss(net.head(features), masks) + gamma * boundary_loss(features, features, masks, 0.5)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    assert torch.allclose(found, expected, atol=1e-6)


def test_orders_differ_with_an_inner_step():
    """The second order has the factor I - beta H, the first has not."""
    first, second = (loss_and_gradient(EpisodicStep(beta=5.0, second_order=order))[0] for order in (False, True))
    assert not torch.allclose(first, second, atol=1e-4)
    assert torch.isfinite(torch.cat([first, second])).all()
