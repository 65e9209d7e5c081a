"""FedAvg's weights: by number of examples."""

from collections.abc import Mapping
from dataclasses import dataclass

from strategies.parts import Weights


@dataclass(frozen=True)
class ByExamples(Weights):
    """p_k = n_k / sum_j n_j over the clients that replied (FedAvg, McMahan et al. 2017)."""

    assumes = breaks = ()

    def known(self, examples: Mapping[str, int]) -> dict[str, float]:
        """The shares of the numbers of distinct training examples."""
        total = sum(examples.values())
        return {client: count / total for client, count in examples.items()}
