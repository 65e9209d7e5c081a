"""Interpolation of low-frequency amplitudes: the style of an image changes, its phase (the content) does not.

    F(x) = A e^{iP};  A' = A (1 - M) + [(1 - lambda) A + lambda A_f] M;  x' = Re F^{-1}(A' e^{iP})

M is 1 on the bins within b of the zero frequency. A_f are the amplitudes of another client. Images are real, so that
A(-u, -v) = A(u, v): half of the spectrum (the columns v = 0..W/2 of rfft2) holds everything, and only its window of
rows -b..b and columns 0..b is ever changed.
"""

import torch
from torch import Tensor

FLAT = 1e-8  # a channel with a smaller variance counts as constant


def half_width(share: float, height: int, width: int) -> int:
    """b = floor(L_w min(H, W)). `window_rows` cuts windows that are larger than the spectrum.

    The product is rounded first: 0.29 * 100 is 28.999... in floating point.
    """
    return int(round(share * min(height, width), 9))


def window_rows(b: int, height: int, device: torch.device | None = None) -> Tensor:
    """Row indices of the frequencies -b..b in an unshifted spectrum; each row once where the window is larger."""
    return torch.arange(-min(b, height // 2), min(b, (height - 1) // 2) + 1, device=device) % height


def window_of(spectrum: Tensor, b: int) -> Tensor:
    """Window [.., rows, columns] of rfft2 values [.., H, W/2+1] (or of their amplitudes)."""
    return spectrum.index_select(-2, window_rows(b, spectrum.shape[-2], spectrum.device))[..., : b + 1]


def amplitude(images: Tensor, b: int | None = None) -> Tensor:
    """|rfft2| of images [B, C, H, W], whole or (with b) its window [B, C, rows, columns]."""
    spectrum = torch.fft.rfft2(images)
    return (spectrum if b is None else window_of(spectrum, b)).abs()


def interpolate(images: Tensor, foreign: Tensor, share: Tensor, b: int) -> Tensor:
    """x' of images [B, C, H, W] with the other client's windows [B, C, rows, columns], lambda = share [B]; not clipped.

    In a constant channel only the mean changes. Its other bins have no phase, and amplitudes of another image would add
    up to one bright corner there.
    """
    height, width = images.shape[-2:]
    spectrum = torch.fft.rfft2(images)
    window = window_of(spectrum, b)
    amplitude = window.abs()
    mixed = torch.lerp(amplitude, foreign, share[:, None, None, None])
    if b > 0:
        mean_only = images.var(dim=(2, 3), correction=0, keepdim=True) < FLAT
        zero = min(b, height // 2)  # the row of the zero frequency
        keep = mean_only.expand_as(mixed).clone()
        keep[..., zero, 0] = False
        mixed = torch.where(keep, amplitude, mixed)
    rows = window_rows(b, height, images.device)
    changed = spectrum.clone()
    changed[..., rows, : window.shape[-1]] = torch.polar(mixed, window.angle())
    return torch.fft.irfft2(changed, s=(height, width))
