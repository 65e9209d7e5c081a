"""Boundaries of structures: masks of them, embeddings on both sides, and the contrast between the two. Pure tensors."""

import torch
import torch.nn.functional as F
from torch import Tensor

RING = 5  # the number of dilations that make the background ring


def _grown(masks: Tensor, times: int = 1) -> Tensor:
    """Masks [B, Q, H, W] of 0 and 1, dilated `times` by a cross (4-connected); pixels outside the image count as 0."""
    for _ in range(times):
        rows = F.max_pool2d(masks, (3, 1), 1, (1, 0))
        masks = torch.maximum(rows, F.max_pool2d(masks, (1, 3), 1, (0, 1)))
    return masks


def contour_and_ring(masks: Tensor, ring: int = RING) -> tuple[Tensor, Tensor]:
    """Contour m - erode(m) and background ring dilate^5(m) - m of masks [B, Q, H, W] of 0 and 1, float.

    A mask is taken to continue outside the image, so that its contour does not follow the image's border.

    Source: ELCFS (Liu et al., CVPR 2021).
    """
    m = masks.float()
    return m - (1 - _grown(1 - m)), _grown(m, ring) - m


def region_means(embeddings: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
    """The mean embedding of every region: h = sum region E / sum region.

    The embeddings E are [B, D, H, W] and the regions [B, Q, H, W]. Returns h [B, Q, D] and whether each region has a
    pixel [B, Q]. An empty region gives 0 and no gradient.
    """
    sums = torch.einsum("bdhw,bqhw->bqd", embeddings, regions)
    sizes = regions.sum((2, 3))
    return sums / sizes.clamp_min(1)[..., None], sizes > 0


def boundary_contrast(contour: Tensor, background: Tensor, tau: float, negatives_only: bool = False) -> Tensor:
    """NT-Xent over vectors with the labels contour and background, a scalar:

        mean over ordered same-label pairs (i, j) of
            -log[ e^{s_ij / tau} / (e^{s_ij / tau} + sum_{label q != label i} e^{s_iq / tau}) ]

    s is the cosine similarity. `negatives_only` leaves out the first summand of the denominator, as the paper prints
    it. contour is [N, D] and background [M, D]. The result is 0 when either has fewer than two vectors.

    Source: ELCFS (Liu et al., CVPR 2021).
    """
    if min(len(contour), len(background)) < 2:
        return 0.0 * (contour.sum() + background.sum())
    a, b = (F.normalize(each, dim=1) for each in (contour, background))
    across = a @ b.T / tau
    losses = [
        _same_label(a @ a.T / tau, torch.logsumexp(across, 1), negatives_only),
        _same_label(b @ b.T / tau, torch.logsumexp(across, 0), negatives_only),
    ]
    return torch.cat(losses).mean()


def _same_label(alike: Tensor, negatives: Tensor, negatives_only: bool) -> Tensor:
    """-log of the share of each ordered pair; alike [N, N] = s_ij / tau, negatives [N] = log sum_q e^{s_iq / tau}."""
    pairs = ~torch.eye(len(alike), dtype=torch.bool, device=alike.device)
    denominator = negatives[:, None].expand_as(alike)
    if not negatives_only:
        denominator = torch.logaddexp(alike, denominator)
    return (denominator - alike)[pairs]


def boundary_loss(
    embeddings: Tensor, moved: Tensor, masks: Tensor, tau: float, ring: int = RING, negatives_only: bool = False
) -> Tensor:
    """L_bd: the sum over structures of the contrast of contours and rings in an image and in its transformed version.

    embeddings [B, D, H, W] are those of the raw images (at theta), and moved [B, D, H, W] those of the transformed ones
    (at theta^). masks are [B, Q, H, W]. Vectors of empty regions are left out.
    """
    sides = []
    for region in contour_and_ring(masks, ring):
        means = [region_means(each.float(), region) for each in (embeddings, moved)]
        sides.append((torch.cat([h for h, _ in means]), torch.cat([mask for _, mask in means])))
    (contour, has_contour), (background, has_background) = sides
    terms = [
        boundary_contrast(contour[has_contour[:, q], q], background[has_background[:, q], q], tau, negatives_only)
        for q in range(masks.shape[1])
    ]
    return torch.stack(terms).sum()
