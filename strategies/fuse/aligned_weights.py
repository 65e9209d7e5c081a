"""FedGaLA's server: tensor by tensor, clients that agree with the common direction count more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from strategies.aggregate import tensorwise_mean
from strategies.moves import moves
from strategies.parts import Fuse, ServerRound, Update

SMALL = 1e-8  # smallest norm


def alignment_weights(vectors: np.ndarray, n_it: int, gamma: float) -> np.ndarray:
    """w [K] from K vectors v [K, n]: a = mean v, then n_it times  s_k = (cos(v_k, a) + 1)/2, w = s / sum s,
    a = sum w_k v_k;  at last w <- (1 - gamma) w + gamma / K.

    cos with a zero vector is 0, so that all-zero vectors get equal weights; so do vectors whose s are all 0.
    """
    count = len(vectors)
    norms = np.maximum(np.linalg.norm(vectors, axis=1), SMALL)
    weights = np.full(count, 1 / count)
    for _ in range(n_it):
        common = weights @ vectors
        scores = (vectors @ common / (norms * max(np.linalg.norm(common), SMALL)) + 1) / 2
        scores = np.maximum(scores, 0.0)  # a cosine of -1 may be less by rounding
        weights = scores / scores.sum() if scores.sum() > 1e-12 else np.full(count, 1 / count)
    return (1 - gamma) * weights + gamma / count


@dataclass(frozen=True)
class AlignedWeights(Fuse):
    """theta = sum_k w_k theta_k per parameter tensor, w = alignment_weights(p_k delta_k), delta_k = theta_k - theta.

    FedGaLA (Pourpanah et al., AAAI 2025), frontier.md 5. p_k enters the directions alone, as in the released code.
    Everything else takes its weighted mean (the released code aligns statistics and counters too, and the weights
    themselves in the first round). `gamma = 1` gives FedAvg with uniform weights for the parameters.

    n_it: how often weights and common direction are computed in turn
    gamma: share of uniform weights in the result
    """

    n_it: Annotated[int, Field(ge=1)] = 3
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.0

    def fuse(
        self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound
    ) -> dict[str, np.ndarray]:
        """The fused model; every w goes to details.csv, its mean over the tensors to the client's weight column."""
        shares = np.array([weights[update.client] for update in updates])
        deltas = moves(updates, server)
        found = {
            name: alignment_weights(
                np.stack([share * delta[name].ravel() for share, delta in zip(shares, deltas, strict=True)]),
                self.n_it, self.gamma,
            )
            for name in deltas[0]
        }  # fmt: skip
        for index, update in enumerate(updates):
            for name, own in found.items():
                server.detail(update.client, "alignment_weight", name, own[index])
            mean = float(np.mean([own[index] for own in found.values()]))
            server.client_columns[update.client] = {"weight": mean}
        states = [update.arrays for update in updates]
        return tensorwise_mean(states, {**dict.fromkeys(states[0], shares), **found})
