"""The coordinate-wise median, which fewer than half of the clients cannot move far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.parts.facts import Fact
from strategies.fuse.enough_clients import equal_columns
from strategies.fuse.trimmed_mean import trimmed_mean
from strategies.parts import ArrayDict, Fuse, ServerRound, Update


@dataclass(frozen=True)
class CoordinateMedian(Fuse):
    """theta[i] = median_k theta_k[i]; with an even number of clients it is the mean of the two middle values.

    Source: Yin et al., ICML 2018 (Algorithm 1, Option I), on models in place of gradients, as in Flower's FedMedian. It
    is robust against fewer than half of the clients, whatever they send. Weights are not used; with two clients it is
    the plain mean.
    """

    assumes = (Fact.SEVERAL_CLIENTS, Fact.EVERY_ENTRY)
    breaks = (Fact.WEIGHTED_MEAN, Fact.CLIENT_WEIGHTS, Fact.EVERY_CLIENT)

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The median of the updates. Every client has 1/K in its weight column."""
        equal_columns(updates, server)
        return trimmed_mean([update.arrays for update in updates], (len(updates) - 1) // 2)
