"""Central differential privacy: the influence of one client on the global model is bounded and hidden by noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from fedsim.parts.facts import Fact
from strategies.aggregate import Arrays, weighted_mean
from strategies.fuse.enough_clients import equal_columns
from strategies.parts import ArrayDict, Fuse, ServerRound, Update


def clipping(state: Arrays, reference: Arrays, bound: float) -> float:
    """min(1, C / ||delta||_2): the factor of delta = theta_k - theta, over all tensors, that keeps its norm below C."""
    parts = (np.subtract(array, reference[name], dtype=np.float64) for name, array in state.items())
    norm = float(np.sqrt(sum(float(np.vdot(part, part)) for part in parts)))
    return min(1.0, bound / norm) if norm > 0 else 1.0


def clipped(array: np.ndarray, reference: np.ndarray, factor: float) -> np.ndarray:
    """theta + factor delta of one tensor (float64 inside, the type stays)."""
    return np.asarray(reference + factor * np.subtract(array, reference, dtype=np.float64), dtype=array.dtype)


@dataclass(frozen=True)
class PrivateMean(Fuse):
    """theta <- theta + 1/K sum_k delta_k min(1, C / ||delta_k||) + N(0, (z C / K)^2), with delta_k = theta_k - theta.

    Source: client-level central differential privacy with fixed clipping (Geyer et al. 2017; McMahan et al., ICLR
    2018), the mechanism of Flower's DifferentialPrivacyServerSideFixedClipping, on replies that were checked before.
    Weights are not used, because the bound on one client's influence needs equal weights. The noise does not come from
    the run's seed: a person who knows the seed could otherwise subtract it. Two runs therefore differ. `noise = 0` with
    a large `clip` gives FedAvg with uniform weights. Models with batch norm are refused, because clipping and noise
    make counters and variances meaningless.

    clip: C, the largest L2 norm of a client's update
    noise: z, the noise multiplier (1 or more for strong privacy)
    """

    clip: Annotated[float, Field(gt=0)] = 1.0
    noise: Annotated[float, Field(ge=0)] = 1.0
    assumes = ()
    breaks = (Fact.WEIGHTED_MEAN, Fact.CLIENT_WEIGHTS, Fact.SINGLE_UPDATES)

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The mean of the clipped updates, with noise."""
        equal_columns(updates, server)
        states, previous = [update.arrays for update in updates], server.previous
        factors = [clipping(state, previous, self.clip) for state in states]
        mean: ArrayDict = {}
        for name in states[0]:  # one tensor after the other, because all models may be too large for the memory
            deltas = [{name: clipped(state[name], previous[name], factor)} for state, factor in zip(states, factors)]
            mean |= weighted_mean(deltas, [1.0] * len(deltas))
        spread, rng = self.noise * self.clip / len(states), np.random.default_rng()
        return {
            name: np.asarray(array + rng.normal(0.0, spread, array.shape), dtype=array.dtype) if spread else array
            for name, array in mean.items()
        }
