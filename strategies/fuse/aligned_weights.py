"""FedGaLA's fusion: in each tensor, clients that agree with the common direction count more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from strategies.aggregate import tensorwise_mean
from strategies.fuse.enough_clients import note_coefficients
from strategies.parts import ArrayDict, Fuse, ServerRound, Update
from strategies.tools.moves import moves

SMALL = 1e-8  # smaller norms are read as this one


def alignment_weights(vectors: np.ndarray, n_it: int, gamma: float) -> np.ndarray:
    """w [K] from K vectors v [K, n]: weights that follow the agreement of each vector with the weighted mean of all.

        a = mean v, then n_it times:  s_k = (cos(v_k, a) + 1)/2,  w = s / sum s,  a = sum w_k v_k
        at the end:                   w <- (1 - gamma) w + gamma / K

    The cosine with a zero vector is 0, so that all-zero vectors get equal weights. Weights are also equal where all s
    are 0.
    """
    count = len(vectors)
    norms = np.maximum(np.linalg.norm(vectors, axis=1), SMALL)
    weights = np.full(count, 1 / count)
    for _ in range(n_it):
        common = weights @ vectors
        scores = (vectors @ common / (norms * max(np.linalg.norm(common), SMALL)) + 1) / 2
        scores = np.maximum(scores, 0.0)  # rounding may make a cosine smaller than -1
        weights = scores / scores.sum() if scores.sum() > 1e-12 else np.full(count, 1 / count)
    return (1 - gamma) * weights + gamma / count


@dataclass(frozen=True)
class AlignedWeights(Fuse):
    """theta = sum_k w_k theta_k per parameter tensor, w = alignment_weights(p_k delta_k), delta_k = theta_k - theta.

    Source: FedGaLA (Pourpanah et al., AAAI 2025). p_k enters only the directions, as in the released code. All other
    tensors take their weighted mean; the released code also aligns statistics and counters, and in the first round the
    weights themselves. `gamma = 1` gives FedAvg with uniform weights for the parameters.

    n_it: how often weights and common direction are computed in turn
    gamma: the share of uniform weights in the result
    """

    n_it: Annotated[int, Field(ge=1)] = 3
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.0

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The fused model. details.csv gets every w, a client's weight column the mean of its w over the tensors."""
        shares = np.array([weights[update.client] for update in updates])
        deltas = moves(updates, server)
        cosines = {
            name: alignment_weights(
                np.stack([share * delta[name].ravel() for share, delta in zip(shares, deltas, strict=True)]),
                self.n_it, self.gamma,
            )
            for name in deltas[0]
        }  # fmt: skip
        note_coefficients(updates, server, "alignment_weight", cosines)
        states = [update.arrays for update in updates]
        return tensorwise_mean(states, dict.fromkeys(states[0], shares) | cosines)
