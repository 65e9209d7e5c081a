"""Amplitude interpolation on numbers worked out by hand, and compared with the full complex transform."""

import pytest
import torch
from small_round import colour_images, small_data, small_round
from torch import Tensor

from clients.augment.frequency import amplitude, half_width, interpolate, window_of, window_rows
from clients.step.episodic import EpisodicStep

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]


def mixed(x: Tensor, foreign: Tensor, share: float, b: int) -> list[list[float]]:
    return interpolate(x, amplitude(foreign, b), torch.full((len(x),), share), b)[0, 0].tolist()


def by_definition(x: Tensor, foreign: Tensor, share: float, b: int) -> Tensor:
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


def test_t1_zero_share_and_the_mean_alone() -> None:
    assert torch.allclose(torch.fft.fft2(X).abs(), torch.tensor([[10.0, 2.0], [4.0, 0.0]]))
    two = torch.full_like(X, 2.0)
    for b in (0, 1):
        assert mixed(X, two, 0.0, b) == [[1, 2], [3, 4]]
    assert mixed(X, two, 0.5, 0) == [[0.75, 1.75], [2.75, 3.75]]
    assert mixed(X, two, 1.0, 0) == [[0.5, 1.5], [2.5, 3.5]]


def test_t2_whole_spectrum() -> None:
    foreign = torch.tensor([[0.0, 4.0], [0.0, 0.0]])[None, None]
    full = torch.tensor(mixed(X, foreign, 1.0, 1))
    assert torch.allclose(full, torch.tensor([[0.0, 0.0], [0.0, 4.0]]), atol=1e-6)
    assert torch.allclose(torch.fft.fft2(full).abs(), torch.fft.fft2(foreign).abs(), atol=1e-5)
    half = torch.tensor(mixed(X, foreign, 0.5, 1))
    assert torch.allclose(half, torch.tensor([[0.5, 1.0], [1.5, 4.0]]), atol=1e-6)
    assert torch.allclose(torch.fft.fft2(half).abs(), torch.tensor([[7.0, 3.0], [4.0, 2.0]]), atol=1e-5)


def test_t3_the_formula_as_printed_is_not_what_happens() -> None:
    assert mixed(X, torch.zeros_like(X), 0.0, 0) == [[1, 2], [3, 4]]  # printed literally: [[-1.5, -.5], [.5, 1.5]]


def test_products_that_are_whole_numbers() -> None:
    """0.29 * 100 is below 29 in floating point, and 0.07 * 100 is above 7."""
    assert half_width(0.29, 100, 100) == 29
    found = EpisodicStep(rho=0.07).collect(small_round(small_data(colour_images(100, 4))))
    assert len(found["amplitude"]) == 7


def test_t4_windows() -> None:
    cases = {(384, 0.01): (3, 49), (384, 0.003): (1, 9), (224, 0.01): (2, 25), (32, 0.01): (0, 1)}
    for (size, share), (b, bins) in cases.items():
        assert half_width(share, size, size) == b
        assert (2 * b + 1) ** 2 == bins
        assert amplitude(torch.zeros(1, 1, size, size), b).shape[2:] == (2 * b + 1, b + 1)
    for height, width in ((8, 8), (7, 9), (5, 12)):
        whole = half_width(1.0, height, width)
        assert sorted(window_rows(whole, height).tolist()) == list(range(height))
        whole = amplitude(torch.zeros(1, 1, height, width), max(height, width))
        assert whole.shape[2:] == (height, width // 2 + 1)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (9, 6), (16, 11)])
def test_every_window_follows_the_definition(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, foreign = torch.rand(2, 3, *size), torch.rand(2, 3, *size)
    for b in range(max(size) + 1):
        for share in (0.0, 0.3, 1.0):
            ours = interpolate(x, amplitude(foreign, b), torch.full((2,), share), b)
            assert torch.allclose(ours, by_definition(x, foreign, share, b), atol=2e-6), (b, share)


def test_t5_the_window_is_all_that_is_used() -> None:
    torch.manual_seed(0)
    x, foreign = torch.rand(4, 3, 32, 30), torch.rand(4, 3, 32, 30)
    share = torch.rand(4)
    for b in (0, 1, 3, 30):
        windowed = amplitude(foreign, b)
        full = amplitude(foreign)
        assert windowed.numel() <= full.numel()
        from_full = interpolate(x, window_of(full, b), share, b)
        assert torch.allclose(interpolate(x, windowed, share, b), from_full, atol=1e-6)


@pytest.mark.parametrize("b", [0, 1, 4, 9])
def test_t5_a_constant_image_stays_constant(b: int) -> None:
    constant = torch.full((1, 2, 8, 9), 0.4)
    for share in (0.0, 0.5, 1.0):
        moved = interpolate(constant, amplitude(torch.rand(1, 2, 8, 9), b), torch.tensor([share]), b)
        assert moved.std(dim=(2, 3)).max() < 1e-6


def test_t6_the_sign_is_the_image_s_own() -> None:
    assert mixed(-X, torch.full_like(X, 2.0), 1.0, 0) == [[-0.5, -1.5], [-2.5, -3.5]]
