"""Boundary-oriented contrast on numbers worked out by hand, and ELCFS's step with it."""

import pytest
import torch
from torch import nn

from clients.local_round import Batch
from clients.step.episodic import EpisodicStep
from clients.tools.contours import boundary_contrast, boundary_loss, contour_and_ring, region_means
from fedsim.models.net import Net
from fedsim.models.tasks import Segmentation

SAME = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
APART = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
GROUND = torch.tensor([[0.0, 1.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("contour", "tau", "expected"), [(SAME, 1.0, 0.551445), (APART, 1.0, 0.885449), (APART, 0.5, 0.758885)]
)
def test_contrast(contour, tau, expected):
    """The contour is like the ground truth, and unlike it at two temperatures."""
    assert boundary_contrast(contour, GROUND, tau).item() == pytest.approx(expected, abs=1e-6)


def test_contrast_at_a_low_temperature_and_with_negatives_only():
    """-log(1 / (1 + 2 e^-20)) = 4.12e-9, in double precision; negatives alone give -1 + log 2."""
    assert boundary_contrast(SAME.double(), GROUND.double(), 0.05).item() == pytest.approx(4.12e-9, rel=1e-2)
    assert boundary_contrast(SAME, GROUND, 1.0, negatives_only=True).item() == pytest.approx(-0.306853, abs=1e-6)


def test_contrast_needs_two_vectors_of_each_label():
    """With one vector there is no pair; the loss is a zero through which gradients can still be computed."""
    one = SAME[:1].clone().requires_grad_()
    loss = boundary_contrast(one, GROUND, 0.05)
    loss.backward()
    assert loss.item() == 0
    assert one.grad.abs().sum() == 0


def test_masks_of_a_square():
    """3x3 in 15x15 has a contour of 8 pixels and a ring of 100; an empty mask has neither."""
    masks = torch.zeros(1, 2, 15, 15)
    masks[0, 0, 6:9, 6:9] = 1
    contour, ring = contour_and_ring(masks)
    assert contour.sum((2, 3)).tolist() == [[8, 0]]
    assert ring.sum((2, 3)).tolist() == [[100, 0]]
    assert not (ring * masks).any()


def test_region_means_are_means_over_pixels():
    """A region of two pixels, and an empty region, whose means are zeros and which is marked as empty."""
    embeddings = torch.arange(8.0).view(1, 2, 2, 2)
    regions = torch.zeros(1, 2, 2, 2)
    regions[0, 0, 0] = 1
    means, found = region_means(embeddings, regions)
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


class _Round:
    """The part of a round that the episode uses."""

    task = Segmentation()
    client = "a"

    def __init__(self, net):
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def parameters(self):
        """All parameters of the network."""
        return dict(self.net.named_parameters())

    def record(self, name, wanted_by):
        """There are no amplitudes of other clients, so x' = x."""
        return {}

    def autocast(self):
        """Do nothing."""
        return torch.autocast("cpu", enabled=False)

    def loss_of(self, batch):
        """The task's loss."""
        batch.features = self.net.features(batch.images)
        return self.task.loss(self.net.head(batch.features), batch.labels)

    def backward(self, loss, keep_graph=False):
        """Compute the gradients."""
        self.optimizer.zero_grad()
        loss.backward(retain_graph=keep_graph)

    def take_step(self):
        """Take no step, because the test compares the gradients."""

    def apply_gradients(self, loss):
        """Compute only the gradients."""
        self.backward(loss)
        return loss.detach()


def small_batch():
    """Two images of noise with a square each."""
    torch.manual_seed(1)
    images, masks = torch.rand(2, 1, 15, 15), torch.zeros(2, 1, 15, 15, dtype=torch.uint8)
    masks[0, 0, 6:9, 6:9] = masks[1, 0, 3:8, 4:9] = 1
    return Batch(images, masks, images, prepare=lambda images: images)


def small_net():
    """A convolution and a head; both are smooth, so that numeric derivatives are exact enough."""
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh()), 3, 1, task=Segmentation())
    return net.double()


def gradient_of(part):
    """Gradient of one episode on float64 images."""
    net, batch = small_net(), small_batch()
    batch.images = batch.raw = batch.images.double()
    part.begin(_Round(net))(batch)
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()]), net, batch


def test_gradient_without_anything_foreign():
    """With gamma = 0, beta = 0 and no foreign amplitudes it is twice the gradient of the Dice loss."""
    found, net, batch = gradient_of(EpisodicStep(gamma=0.0, beta=0.0))
    loss = Segmentation().loss(net(batch.images), batch.labels)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    assert torch.allclose(found, 2 * expected, atol=1e-9)


@pytest.mark.parametrize("second_order", [False, True])
def test_boundary_term_reaches_both_embeddings(second_order):
    """At beta = 0 the gradient is that of 2 L + gamma L_bd(E, E), with both orders."""
    found, net, batch = gradient_of(EpisodicStep(gamma=0.7, beta=0.0, tau=0.5, second_order=second_order))
    features = net.features(batch.images)
    loss = 2 * Segmentation().loss(net.head(features), batch.labels)
    loss = loss + 0.7 * boundary_loss(features, features, batch.labels, 0.5)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    assert torch.allclose(found, expected, atol=1e-6)


def test_orders_differ_with_an_inner_step():
    """The second order has the factor I - beta H, the first has not."""
    first, second = (gradient_of(EpisodicStep(beta=5.0, second_order=order))[0] for order in (False, True))
    assert not torch.allclose(first, second, atol=1e-4)
    assert torch.isfinite(torch.cat([first, second])).all()
