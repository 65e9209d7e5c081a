"""CSAC's data-free fusion: in each tensor, a client far from the average counts more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.parts.facts import Fact
from strategies.aggregate import divergence_coefficients, tensorwise_mean
from strategies.fuse.enough_clients import note_coefficients
from strategies.parts import ArrayDict, Fuse, ServerRound, Update


@dataclass(frozen=True)
class SemanticDivergence(Fuse):
    """avg_l = mean_h G_l^h; dist_l^h = ||G_l^h - avg_l||; c_l^h = dist_l^h / sum_j dist_l^j; M_l = sum_h c_l^h G_l^h.

    Source: CSAC (Yuan et al., TKDE 2023), semantic aggregation. Data sizes are not used. With two clients both
    distances are equal, so that the rule is the plain mean. `strategy = "average"` gives FedAvg with uniform weights.

    metric: l2 (default), l1 or cosine
    strategy: divergence (default); average, c = 1/H; or similarity, c_l^h = (1/dist_l^h) / sum_j (1/dist_l^j), for
    which the paper prints no formula, so that this one is ours
    granularity: one c per `tensor` (released code; default) or per leaf `module` (the paper's "layer")
    """

    metric: Literal["l2", "l1", "cosine"] = "l2"
    strategy: Literal["divergence", "average", "similarity"] = "divergence"
    granularity: Literal["tensor", "module"] = "tensor"
    breaks = (Fact.WEIGHTED_MEAN, Fact.CLIENT_WEIGHTS)

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The fused model. details.csv gets every c, a client's weight column the mean of its c over the tensors."""
        states = [update.arrays for update in updates]
        groups = {name: name.rpartition(".")[0] for name in states[0]} if self.granularity == "module" else None
        coefficients = divergence_coefficients(states, self.metric, self.strategy, groups)
        note_coefficients(updates, server, "divergence_weight", coefficients)
        return tensorwise_mean(states, coefficients)
