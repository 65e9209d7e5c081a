"""Amplitude interpolation on numbers worked out by hand, and compared with the full complex transform."""

import pytest
import torch
from small_round import colour_images, small_data, small_round

from clients.augment.frequency import amplitude, half_width, interpolate, window_of, window_rows
from clients.step.episodic import EpisodicStep

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


def test_products_that_are_whole_numbers():
    """0.29 * 100 is below 29 in floating point, and 0.07 * 100 is above 7."""
    assert half_width(0.29, 100, 100) == 29
    found = EpisodicStep(rho=0.07).collect(small_round(small_data(colour_images(100, 4))))
    assert len(found["amplitude"]) == 7


def test_windows():
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
