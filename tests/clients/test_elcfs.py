"""ELCFS: amplitudes and meta-gradients on hand-computed numbers, the transfer, and the boundary term."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_round import colour_images, ready_round, small_data, small_net, small_round
from torch import nn

from clients.augment.frequency import amplitude, half_width, interpolate, window_of, window_rows
from clients.local_round import Batch
from clients.step.episodic import EpisodicStep, boundary_contrast, boundary_loss, contour_and_ring, region_means
from fedsim.models.net import Net
from fedsim.models.tasks import Segmentation
from strategies.banks.amplitude import AmplitudeBank
from strategies.parts import ServerRound

FIRST_ROUND = ServerRound(1, 3, [], {})


def amplitudes(part, clients="bc"):
    """What client `a` receives from clients with different images."""
    images = colour_images(20, seed=5, offset=100)
    entries = {client: part.collect(small_round(small_data(images, client=client))) for client in clients}
    assert not any(AmplitudeBank().accept(client, arrays, FIRST_ROUND) for client, arrays in entries.items())
    return {"amplitude": AmplitudeBank().hand_out(entries, "a", FIRST_ROUND)}


def one_step(part, net, records=None, terms=()):
    """Parameter changes of one SGD step, the batch and the loss."""
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    round = ready_round(net, amplitudes(part) if records is None else records, 12, lr=1.0)
    round.terms, batch = list(terms), round.data.batch(np.arange(12))
    torch.manual_seed(3)
    loss = part.begin(round)(batch)
    return {name: value.detach() - before[name] for name, value in net.named_parameters()}, batch, loss


@pytest.mark.parametrize(
    ("second_order", "clip", "gradient", "loss"),
    [(False, 100, 3.2, 1.18), (True, 100, 2.96, 1.18), (False, 1, 3.6, 1.32), (True, 1, 3.6, 1.32)],
)
def test_meta_gradient(second_order, clip, gradient, loss):
    net = nn.Module()
    net.theta = nn.Parameter(torch.tensor(1.0))
    part = EpisodicStep(beta=0.1, clip=clip, second_order=second_order)
    round = small_round(small_data(colour_images(3)), net=net, optimizer=torch.optim.SGD(net.parameters(), 1.0))
    episode = part._second_order if second_order else part._first_order
    total = episode(round, lambda: net.theta**2, lambda stepped: 2 * (stepped["theta"] - 0.5) ** 2)
    assert 1 - net.theta.item() == pytest.approx(gradient, abs=1e-5)
    assert total.item() == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("second_order", [False, True])
def test_without_transfer_and_inner_step_the_gradient_doubles(second_order):
    """Terms act on the inner pass alone: sum of logits / 12 moves every bias of the head by 1."""
    plain, net, part = small_net(), small_net(), EpisodicStep(beta=0.0, lam=(0.0, 0.0), second_order=second_order)
    changes, batch, loss = one_step(part, net)
    reference = F.cross_entropy(plain(batch.images), batch.labels)
    reference.backward()
    assert loss.item() == pytest.approx(2 * reference.item(), rel=1e-5)
    assert torch.allclose(net.backbone[1].running_mean, plain.backbone[1].running_mean, atol=1e-6)
    assert int(net.backbone[1].num_batches_tracked) == 1  # statistics follow the inner pass alone
    for name, parameter in plain.named_parameters():
        assert torch.allclose(changes[name], -2 * parameter.grad, atol=1e-5), name
    added, _, _ = one_step(part, small_net(), terms=[lambda batch: batch.logits.sum() / 12])
    assert torch.allclose(added["head.bias"] - changes["head.bias"], torch.full((3,), -1.0), atol=1e-5)


def test_versions_lean_towards_the_foreign_brightness():
    """Window and full spectrum train alike and disclose different things."""
    part = EpisodicStep(lam=(1.0, 1.0), L_w=0.0, m_test="all")
    round = small_round(small_data(colour_images(6)), amplitudes(part))
    raw = round.data.raw(np.arange(6))
    versions = part.transfer(round)(raw)
    assert [len(EpisodicStep(m_test=m).transfer(round)(raw)) for m in (1, 2, 5, "all")] == [1, 2, 2, len(versions)]
    for version in versions:
        assert version.mean() > raw.mean() + 0.1
        assert 0 <= version.min() <= version.max() <= 1
    drawn = EpisodicStep(L_w=0.0).transfer(round)(raw)[0]
    shares = (drawn.mean(dim=(1, 2, 3)) - raw.mean(dim=(1, 2, 3))).tolist()
    assert len({f"{share:.3f}" for share in shares}) > 3  # lambda is drawn per image
    results = []
    for spectrum, shape in (("window", (3, 3, 7, 4)), ("full", (3, 3, 16, 9))):
        part = EpisodicStep(L_w=0.2, spectrum=spectrum)
        records = amplitudes(part)
        assert {array.shape for array in records["amplitude"].values()} == {shape}
        results.append(one_step(part, small_net(), records)[0])
        assert ("lowest frequencies" if spectrum == "window" else "autocorrelation") in part.discloses
    for name, change in results[0].items():
        assert torch.allclose(change, results[1][name], atol=1e-6)


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


def test_contours():
    """A square has a contour of 8 pixels and a ring of 100; structures add up; empty ones give 0."""
    masks = torch.zeros(1, 2, 15, 15)
    masks[0, 0, 6:9, 6:9] = 1
    contour, ring = contour_and_ring(masks)
    assert (contour.sum((2, 3)).tolist(), ring.sum((2, 3)).tolist()) == ([[8, 0]], [[100, 0]])
    assert not (ring * masks).any()
    regions = torch.zeros(1, 2, 2, 2)
    regions[0, 0, 0] = 1
    means, found = region_means(torch.arange(8.0).view(1, 2, 2, 2), regions)
    assert means.tolist() == [[[0.5, 4.5], [0.0, 0.0]]]
    assert found.tolist() == [[True, False]]
    torch.manual_seed(0)
    masks = torch.zeros(2, 1, 15, 15)
    masks[:, 0, 6:9, 6:9] = 1
    raw, moved = torch.randn(2, 2, 4, 15, 15)
    one = boundary_loss(raw, moved, masks, 0.5)
    assert boundary_loss(raw, moved, masks.expand(-1, 2, -1, -1), 0.5).item() == pytest.approx(2 * one.item())
    assert boundary_loss(raw, moved, torch.zeros_like(masks), 0.5).item() == 0
    one = SAME[:1].clone().requires_grad_()
    loss = boundary_contrast(one, GROUND, 0.05)
    loss.backward()
    assert loss.item() == one.grad.abs().sum() == 0


@pytest.mark.parametrize(("gamma", "second_order"), [(0.0, False), (0.7, False), (0.7, True)])
def test_boundary_term_reaches_both_embeddings(gamma, second_order):
    """At beta = 0 the gradient is that of 2 L + gamma L_bd(E, E), with both orders; nothing foreign came: x' = x."""
    torch.manual_seed(1)
    images, masks = torch.rand(2, 1, 15, 15).double(), torch.zeros(2, 1, 15, 15, dtype=torch.uint8)
    masks[0, 0, 6:9, 6:9] = masks[1, 0, 3:8, 4:9] = 1
    net = Net(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh()), 3, 1, task=Segmentation()).double()
    round = small_round(small_data(colour_images(3)), {"amplitude": {}}, net, task=Segmentation(), classes=1)
    round.optimizer = torch.optim.SGD(net.parameters(), 0.0)
    part = EpisodicStep(gamma=gamma, beta=0.0, tau=0.5, second_order=second_order)
    part.begin(round)(Batch(images, masks, images, prepare=lambda images: images))
    features = net.features(images)
    loss = 2 * Segmentation().loss(net.head(features), masks) + gamma * boundary_loss(features, features, masks, 0.5)
    for parameter, expected in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
        assert torch.allclose(parameter.grad, expected, atol=1e-6)


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
TWO = torch.full_like(X, 2.0)
OTHER = torch.tensor([[0.0, 4.0], [0.0, 0.0]])[None, None]


def by_definition(x, foreign, share, b):
    """The formula with a centred mask on the whole complex spectrum, in float64."""
    spectrum, other = (torch.fft.fftshift(torch.fft.fft2(v.double()), dim=(-2, -1)) for v in (x, foreign))
    height, width = x.shape[-2:]
    mask = torch.zeros(height, width)
    mask[max(height // 2 - b, 0) : height // 2 + b + 1, max(width // 2 - b, 0) : width // 2 + b + 1] = 1
    own, phase = spectrum.abs(), spectrum.angle()
    changed = own * (1 - mask) + ((1 - share) * own + share * other.abs()) * mask
    result = torch.fft.ifft2(torch.fft.ifftshift(torch.polar(changed, phase), dim=(-2, -1)))
    assert result.imag.abs().max() < 1e-6
    return result.real.float()


@pytest.mark.parametrize(("x", "foreign", "share", "b", "wanted"), [
    (X, TWO, 0.0, 0, [[1, 2], [3, 4]]), (X, TWO, 0.0, 1, [[1, 2], [3, 4]]),
    (X, TWO, 0.5, 0, [[0.75, 1.75], [2.75, 3.75]]), (X, TWO, 1.0, 0, [[0.5, 1.5], [2.5, 3.5]]),  # the mean alone
    (X, OTHER, 1.0, 1, [[0, 0], [0, 4]]), (X, OTHER, 0.5, 1, [[0.5, 1.0], [1.5, 4.0]]),  # the whole spectrum
    (X, 0 * X, 0.0, 0, [[1, 2], [3, 4]]),  # the formula as printed gives [[-1.5, -.5], [.5, 1.5]]
    (-X, TWO, 1.0, 0, [[-0.5, -1.5], [-2.5, -3.5]]),  # the sign is the image's own
])  # fmt: skip
def test_numbers_by_hand(x, foreign, share, b, wanted):
    found = interpolate(x, amplitude(foreign, b), torch.tensor([share]), b)[0, 0]
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float32), atol=1e-6)


def test_windows():
    """0.29 * 100 is below 29 in floating point, and 0.07 * 100 is above 7."""
    assert half_width(0.29, 100, 100) == 29
    found = EpisodicStep(rho=0.07).collect(small_round(small_data(colour_images(100, 4))))
    assert len(found["amplitude"]) == 7
    for (size, share), b in {(384, 0.01): 3, (384, 0.003): 1, (224, 0.01): 2, (32, 0.01): 0}.items():
        assert half_width(share, size, size) == b
        assert amplitude(torch.zeros(1, 1, size, size), b).shape[2:] == (2 * b + 1, b + 1)
    for height, width in ((8, 8), (7, 9), (5, 12)):
        assert sorted(window_rows(half_width(1.0, height, width), height).tolist()) == list(range(height))
        whole = amplitude(torch.zeros(1, 1, height, width), max(height, width))
        assert whole.shape[2:] == (height, width // 2 + 1)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (9, 6), (16, 11)])
def test_every_window_follows_the_definition(size):
    """Of the other image it needs the window alone; a constant image stays constant."""
    torch.manual_seed(0)
    x, foreign = torch.rand(2, 3, *size), torch.rand(2, 3, *size)
    x[1] = 0.4
    for b in range(max(size) + 1):
        windowed = amplitude(foreign, b)
        assert torch.allclose(windowed, window_of(amplitude(foreign), b), atol=1e-6)
        for share in (0.0, 0.3, 1.0):
            ours = interpolate(x, windowed, torch.full((2,), share), b)
            assert torch.allclose(ours[:1], by_definition(x, foreign, share, b)[:1], atol=2e-6), (b, share)
            assert ours[1].std(dim=(1, 2)).max() < 1e-6
