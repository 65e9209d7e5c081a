"""Cross-layer calibration: it aligns every feature level of the fused model with every level of the local model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from clients.tools.losses import at_least_float32, bandwidth, kernel_mean, kernel_sum, squared_distances

CHANNELS = 32  # of projected levels


class Projections(nn.Module):
    """One convolution for each feature level; all project to the same shape [B, 32, g, w].

    A level of size s is projected to the target size t by a convolution. For s = t its kernel is 1×1. For s = 2t it is
    3×3, with stride 2 and padding 1. Otherwise its size is 1 + s − t, without padding.

    shapes: (channels, height, width) of every level
    target: (g, w)
    proj: "conv" as above; "pool1x1" is adaptive average pooling to t and then 1×1, for small machines

    Raises ValueError if a level is smaller than the target.

    Source: CSAC's released code, which has 32 channels. The paper says "size of the last layer's features", which is
    512 channels on ResNet-18; the first convolution alone would then have 32 million weights.
    """

    def __init__(self, shapes: Sequence[tuple[int, int, int]], target: tuple[int, int], proj: str) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_projection(shape, target, proj) for shape in shapes)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """The projected features, one [B, 32, g, w] per level."""
        return [project(feature) for project, feature in zip(self.levels, features, strict=True)]


def _projection(shape: tuple[int, int, int], target: tuple[int, int], proj: str) -> nn.Module:
    """The module that projects one level to [32, *target]."""
    depth, *size = shape
    if any(s < t for s, t in zip(size, target)):
        raise ValueError(f"a feature level of size {tuple(size)} cannot be projected to the larger {tuple(target)}")
    if proj == "pool1x1":
        return nn.Sequential(nn.AdaptiveAvgPool2d(target), nn.Conv2d(depth, CHANNELS, 1))
    if all(s == t for s, t in zip(size, target)):
        return nn.Conv2d(depth, CHANNELS, 1)
    if all(s == 2 * t for s, t in zip(size, target)):
        return nn.Conv2d(depth, CHANNELS, 3, stride=2, padding=1)
    (height, width), (h, w) = size, target
    return nn.Conv2d(depth, CHANNELS, (1 + height - h, 1 + width - w))


QueryKey = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def query_key_pairs(levels: int, device: torch.device) -> list[QueryKey]:
    """A query and a key convolution for every level, with random weights that are never trained (released code)."""
    convolutions = (nn.Conv2d(CHANNELS, CHANNELS, 1).to(device) for _ in range(2 * levels))
    return list(zip(convolutions, convolutions))


@torch.no_grad()
def attention(
    A: Sequence[Tensor], B: Sequence[Tensor], qk: Sequence[QueryKey] | None = None, position: bool = True,
    channel: bool = True,
) -> Tensor:  # fmt: skip
    """The weight alpha [L, L] of local level m for fused level l; rows sum to 1, and no gradient flows through it.

    With A_l and B_m as c × d matrices, d = g·w, and avg the mean over all entries and the batch:

        pos_{l,m} = avg(A_l^T B_m)
        ch_{l,m} = avg(A_l B_m^T)
        alpha_{l,m} = ½ (softmax_m(pos_{l,:}) + softmax_m(ch_{l,:}))

    A, B: the projected features of the fused and the local model, one [B, c, g, w] per level
    qk: a (query, key) pair per level, for the position scores: the query is applied to that level of A, the key to that
    of B
    position, channel: with one of them off, the softmax of the other stands alone; with both off, alpha is uniform

    The mean over the entries of a product is a product of means, so that the d × d and c × c maps are never built: pos
    = Σ_c mean_d(A) mean_d(B), ch = Σ_d mean_c(A) mean_c(B).

    Source: CSAC (Yuan et al., TKDE 2023), cross-layer attention. The query and key convolutions (qk) of the released
    code are never trained; they are off by default, as in the paper.
    """
    levels = len(B)
    with torch.autocast(A[0].device.type, enabled=False):
        query, key = _stacked(A, 2), _stacked(B, 2)
        scores = []
        if position:
            q, k = query, key
            if qk is not None:
                q = _stacked([pair[0](at_least_float32(a)) for pair, a in zip(qk, A, strict=True)], 2)
                k = _stacked([pair[1](at_least_float32(b)) for pair, b in zip(qk, B, strict=True)], 2)
            scores.append(_mean_product(q.mean(3), k.mean(3)))
        if channel:
            scores.append(_mean_product(query.mean(2), key.mean(2)))
        if not scores:
            return query.new_full((len(A), levels), 1.0 / levels)
        return torch.stack(scores).softmax(2).mean(0)


def _stacked(features: Sequence[Tensor], start: int) -> Tensor:
    """The features [B, c, g, w] of every level, flat from a dimension on: [L, B, c, d] or [L, B, c·d]."""
    return torch.stack([at_least_float32(feature).flatten(start) for feature in features])


def _mean_product(a: Tensor, b: Tensor) -> Tensor:
    """The mean over the batch of <a_l, b_m>: [L, B, e] and [M, B, e] to [L, M]."""
    return a.flatten(1) @ b.flatten(1).T / a.shape[1]


def alignment_loss(
    proj_m: Sequence[Tensor], proj_l: Sequence[Tensor], alpha: Tensor | None, distance: str = "mmd",
    pairs: str = "cross", statistic: str = "u",
) -> Tensor:  # fmt: skip
    """The weighted discrepancy between the projected features of the fused and of the local model.

        "cross":       L_AL = Σ_l Σ_m alpha_{l,m} · D(M_l, L_m)
        "same_layer":  L_AL = Σ_l D(M_l, L_l), as if only m = l were allowed

    proj_m, proj_l: L features [B, c, g, w] each
    alpha: [L, L]; "same_layer" does not use it
    distance: D is "mmd", `clients.tools.losses.mk_mmd` on flattened features, or "mse", the mean squared difference
    statistic: "u" or "v", of MMD

    Gradients reach proj_m and proj_l, but not alpha. MMD needs B ≥ 2; with fewer it is 0.0.

    Source: CSAC (Yuan et al., TKDE 2023), L_AL. "same_layer" and "mse" are its ablations.
    """
    x, y = _stacked(proj_m, 1), _stacked(proj_l, 1)
    with torch.autocast(x.device.type, enabled=False):
        if distance == "mmd":
            discrepancy = _pairwise_mmd(x, y, statistic)
        else:
            discrepancy = (x[:, None] - y[None, :]).square().mean((2, 3))
        if pairs == "same_layer":
            return discrepancy.diagonal().sum()
        assert alpha is not None
        return (alpha.detach().to(discrepancy.dtype) * discrepancy).sum()


def _mean_distances(blocks: Tensor, L: int) -> Tensor:
    """The mean squared distance [L, M] within each pair of sets, from all blocks [L + M, L + M, B, B]."""
    mean = blocks.detach().mean((2, 3))
    spread = mean.diagonal()
    return (spread[:L, None] + spread[None, L:] + 2 * mean[:L, L:]) / 4


def _pairwise_mmd(x: Tensor, y: Tensor, statistic: str) -> Tensor:
    """MMD of every set x_l [B, D] against every set y_m: [L, B, D] and [M, B, D] to [L, M].

    One Gram matrix of all (L + M)·B rows holds every distance; each pair (l, m) has a bandwidth of its own.
    """
    (L, B, _), M = x.shape, len(y)
    if B < 2:
        return 0.0 * (x.sum() + y.sum()) * x.new_ones(L, M)
    z = torch.cat([x, y]).flatten(0, 1)
    blocks = squared_distances(z).unflatten(1, (L + M, B)).unflatten(0, (L + M, B)).transpose(1, 2)
    within = blocks.diagonal(dim1=0, dim2=1).movedim(-1, 0)
    within_x, within_y, between = within[:L, None], within[None, L:], blocks[:L, L:]
    s = bandwidth(_mean_distances(blocks, L), z)[:, :, None, None]
    inside = kernel_mean(kernel_sum(within_x, s), statistic) + kernel_mean(kernel_sum(within_y, s), statistic)
    mmd = inside - 2 * kernel_mean(kernel_sum(between, s), "v")
    return torch.where(s[:, :, 0, 0] > 0, mmd, 0.0 * x.sum())
