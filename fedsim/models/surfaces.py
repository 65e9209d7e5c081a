"""Shapes of masks on the CPU: connected components and distances between surfaces."""

import numpy as np
import torch
from torch import Tensor


def largest_components(masks: Tensor) -> Tensor:
    """Masks [B, Q, H, W] with the largest 4-connected component of each alone, the first of equals; uint8."""
    from scipy import ndimage

    kept = masks.to(torch.uint8).cpu().numpy()
    for mask in kept.reshape(-1, *kept.shape[2:]):
        parts, count = ndimage.label(mask)
        if count > 1:
            mask[parts != 1 + np.argmax(np.bincount(parts.ravel())[1:])] = 0
    return torch.from_numpy(kept).to(masks.device)


def surface_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Average symmetric surface distance of two masks [H, W] in pixels.

    (sum_{p in S(a)} d(p, S(b)) + sum_{p in S(b)} d(p, S(a))) / (|S(a)| + |S(b)|), S the pixels of a mask with a
    4-neighbour outside it (the image's border counts as outside). 0 where both are empty, the image's diagonal where
    one is.
    """
    from scipy import ndimage

    a, b = a.astype(bool), b.astype(bool)
    if not a.any() or not b.any():
        return float(np.hypot(*a.shape)) if a.any() or b.any() else 0.0
    surfaces = [mask & ~ndimage.binary_erosion(mask) for mask in (a, b)]
    from_a, from_b = (ndimage.distance_transform_edt(~surface) for surface in surfaces)
    total = from_b[surfaces[0]].sum() + from_a[surfaces[1]].sum()
    return float(total / (surfaces[0].sum() + surfaces[1].sum()))
