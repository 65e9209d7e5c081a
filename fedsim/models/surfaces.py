"""Shapes of masks, on the CPU: connected components and distances between surfaces."""

import numpy as np
import torch
from torch import Tensor


def largest_components(masks: Tensor) -> Tensor:
    """Masks [B, Q, H, W] reduced to the largest 4-connected component of each, uint8; of equal ones the first."""
    from scipy import ndimage

    # A copy in C order: of another layout, `reshape` would be a copy, from which nothing comes back.
    array = np.array(masks.to(torch.uint8).cpu().numpy(), order="C")
    for mask in array.reshape(-1, *array.shape[2:]):
        parts, count = ndimage.label(mask)
        if count > 1:
            mask[parts != 1 + np.argmax(np.bincount(parts.ravel())[1:])] = 0
    return torch.from_numpy(array).to(masks.device)


def surface_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The average symmetric surface distance of two masks [H, W], in pixels.

        (sum_{p in S(a)} d(p, S(b)) + sum_{p in S(b)} d(p, S(a))) / (|S(a)| + |S(b)|)

    S are the pixels of a mask that have a 4-neighbour outside it; positions beyond the image's border count as outside.
    The distance is 0 where both masks are empty, and the image's diagonal where one is.
    """
    from scipy import ndimage

    a, b = a.astype(bool), b.astype(bool)
    if not a.any() or not b.any():
        return float(np.hypot(*a.shape)) if a.any() or b.any() else 0.0
    surfaces = [mask & ~ndimage.binary_erosion(mask) for mask in (a, b)]
    from_a, from_b = (ndimage.distance_transform_edt(~surface) for surface in surfaces)
    total = from_b[surfaces[0]].sum() + from_a[surfaces[1]].sum()
    return float(total / (surfaces[0].sum() + surfaces[1].sum()))
