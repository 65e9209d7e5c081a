"""FedAvg's fusion: the weighted mean of every tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strategies.aggregate import weighted_mean
from strategies.parts import ArrayDict, Fuse, ServerRound, Update


@dataclass(frozen=True)
class WeightedMean(Fuse):
    """theta = sum_k p_k theta_k in float64, cast back; the maximum of integer buffers (FedAvg, McMahan et al. 2017)."""

    assumes = breaks = ()  # with one client the mean is its update, and what relies on a weighted mean may

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The weighted mean of all tensors, batch-norm statistics included."""
        return weighted_mean([update.arrays for update in updates], [weights[update.client] for update in updates])
