"""All clients that replied have equal weights."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedsim.parts.facts import Fact
from strategies.parts import Weights


@dataclass(frozen=True)
class Uniform(Weights):
    """p_k = 1/|U_t| over the clients that replied (FedSB, ICASSP 2025)."""

    assumes, breaks = (Fact.SEVERAL_CLIENTS,), ()

    def known(self, examples: Mapping[str, int]) -> dict[str, float]:
        """Equal shares."""
        return dict.fromkeys(examples, 1.0 / len(examples))
