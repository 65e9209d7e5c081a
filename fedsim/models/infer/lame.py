"""LAME: predictions of a test batch are drawn towards those of the images with the most similar features."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.net import Net
from fedsim.settings.tuned import Tuned


def nearest_others(features: Tensor, k: int) -> Tensor:
    """W [B, B]: 1 where j is one of the k other rows with the highest cosine to row i, else 0; features [B, d]."""
    directions = F.normalize(features, dim=1)
    cosines = (directions @ directions.T).fill_diagonal_(-torch.inf)
    nearest = cosines.topk(min(k, len(features) - 1), dim=1).indices
    return torch.zeros_like(cosines).scatter_(1, nearest, 1.0)


def laplacian_adjusted(log_p: Tensor, affinity: Tensor, most: int = 100, tolerance: float = 1e-8) -> Tensor:
    """log Y [B, M] of the repeated Y <- softmax(log p + W Y), which begins with Y = p.

    It ends after `most` steps, or when sum Y log(Y / p) - sum Y (W Y) changes by at most `tolerance` times itself.
    """
    log_y, before = log_p, math.nan
    for _ in range(most):
        log_y = (log_p + affinity @ log_y.exp()).log_softmax(1)
        y = log_y.exp()
        energy = float((y * (log_y - log_p)).sum() - (y * (affinity @ y)).sum())
        if abs(energy - before) <= tolerance * abs(before):
            break
        before = energy
    return log_y


@dataclass(frozen=True)
class LAME(Infer):
    """Y <- softmax_k(log p + W Y), repeated from Y = p; W_ij = 1 where j is one of the k nearest others of i.

    p [B, M] are the model's predictions of a batch, in eval mode, and neighbours are found by the cosine of the
    features that the head sees. For a symmetric W, sum_i KL(Y_i || p_i) - (1/2) sum_ij W_ij Y_i . Y_j is
    stationary where the repetition ends; the energy whose change stops it has 1 in place of 1/2.

    Source: LAME (Boudiaf et al., CVPR 2022), equations 5 to 7, with 5 neighbours, the best of the paper. W is not made
    symmetric, as in the released code (fiveai/LAME d2e5f63), which we did not copy. The rule is transductive and uses
    no label; it has no parameter, no gradient and no state, and never changes the model, so that it works on any row.
    It costs one forward pass, and at most 100 products of a B x B with a B x M matrix for a batch. `k = 0` gives eval
    mode. Each batch is adjusted by itself.

    k: the number of neighbours; the paper selects it from 1, 3 and 5
    batch: the number of images that are adjusted together, for every size of the evaluation batches
    """

    transductive: ClassVar[bool] = True
    shuffled: ClassVar[bool] = True

    k: Annotated[int, Field(ge=0), Tuned("1,3,5", "the paper")] = 5
    batch: Annotated[int, Field(ge=1)] = 64

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A function that adjusts the predictions of each batch; it returns their logarithms."""
        net.eval()

        @torch.no_grad()
        def adjusted(images: Tensor) -> Tensor:
            features = net.features(images)
            log_p = net.head(features).float().log_softmax(1)
            return laplacian_adjusted(log_p, nearest_others(features.float(), self.k))

        return lambda images: torch.cat([adjusted(part) for part in images.split(self.batch)])
