"""A client's style in which every cluster of like images counts the same (FISC)."""

import numpy as np
import torch
from torch import Tensor

from clients.augment import style
from clients.augment.spaces import chunks_of
from clients.parts import LocalRound
from strategies.tools.finch import partitions_of_products

KEPT_BYTES = 2**30  # of feature maps that are held while their products with all others are computed


def pool_clusters(means: Tensor, variances: Tensor, labels: np.ndarray) -> style.Statistics:
    """Mean and variance [C_s] in which clusters of images count the same, from each image's own [n, C_s].

        m_q, e_q = mean and second moment over all positions of all images of cluster q
        mu = mean_q m_q,  var = mean_q e_q - mu^2 = mean_q [e_q - m_q^2 + (m_q - mu)^2]

    labels: the cluster numbers [n], 0 .. J-1. The sums are centred, as in `style.pool`.
    """
    members = [torch.from_numpy(np.flatnonzero(labels == label)) for label in range(labels.max() + 1)]
    pooled = [style.pool(means[rows], variances[rows]) for rows in members]
    return style.pool(*(torch.stack(values) for values in zip(*pooled)))


def map_clusters(round: LocalRound, space: style.Space, positions: np.ndarray) -> np.ndarray:
    """Cluster numbers [n] of training images, by FINCH on their flattened feature maps; its coarsest partition."""
    return partitions_of_products(map_products(round, space, positions))[-1]


def style_clusters(means: Tensor, variances: Tensor) -> np.ndarray:
    """Cluster numbers [n] of images, by FINCH on their styles (mu, sigma), each [n, C_s]; its coarsest partition."""
    styles = torch.cat([means, style.deviation(variances)], dim=1).double()
    return partitions_of_products((styles @ styles.T).cpu().numpy())[-1]


def map_products(round: LocalRound, space: style.Space, positions: np.ndarray) -> np.ndarray:
    """The inner products [n, n], float64, of the flattened feature maps of training images.

    Maps are held up to KEPT_BYTES, and made again for each group of those that are held. The products are sums in
    float64.
    """
    chunks = chunks_of(positions, space)
    starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    products = torch.zeros(len(positions), len(positions), dtype=torch.float64, device=round.device)
    first = 0
    while first < len(chunks):
        held: list[Tensor] = []
        for number in range(first, len(chunks)):
            maps = _flat(round, space, chunks[number])
            room = len(held) == number - first and (len(held) + 1) * maps.nbytes <= KEPT_BYTES
            if room or not held:
                held.append(maps)
            columns = slice(starts[number], starts[number + 1])
            for place, others in enumerate(held, start=first):
                rows = slice(starts[place], starts[place + 1])
                block = others.double() @ maps.double().T
                products[rows, columns], products[columns, rows] = block, block.T
        first += len(held)
    return products.cpu().numpy()


def _flat(round: LocalRound, space: style.Space, positions: np.ndarray) -> Tensor:
    """The feature maps of some images as rows."""
    return torch.cat([band.flatten(1) for band in space.encode(round.data.raw(positions))], dim=1)
