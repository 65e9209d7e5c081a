"""The coordinate-wise trimmed mean, without weights, which a few broken or malicious clients cannot move far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from fedsim.common.errors import UserError
from fedsim.parts.facts import Fact
from fedsim.settings.experiment import Experiment
from strategies.aggregate import Arrays
from strategies.fuse.enough_clients import clients_in_a_round, equal_columns
from strategies.parts import ArrayDict, Fuse, ServerRound, Update


def trimmed_mean(states: Sequence[Arrays], trim: int) -> ArrayDict:
    """For each coordinate, the mean of the values without the `trim` smallest and the `trim` largest.

        x_(1) <= ... <= x_(K) ;  result = 1/(K - 2m) sum_{k = m+1}^{K-m} x_(k) , m = trim   (float tensors, in float64)

    Integer tensors take the lower median, so that no client alone sets a counter. Raises ValueError when no value would
    be left.
    """
    count = len(states)
    if not 0 <= 2 * trim < count:
        raise ValueError(f"cannot leave out {trim} of {count} values at each end")
    result = {}
    for name, first in states[0].items():
        values = np.sort(np.stack([state[name] for state in states]), axis=0)
        if first.dtype.kind == "f":
            middle = values[trim : count - trim].astype(np.float64)
            result[name] = np.asarray(middle.mean(axis=0), dtype=first.dtype)
        else:
            result[name] = np.array(values[(count - 1) // 2])
    return result


@dataclass(frozen=True)
class TrimmedMean(Fuse):
    """theta[i] = mean of theta_k[i] without the m smallest and the m largest values, m = floor(beta K).

    Source: Yin et al., ICML 2018 (Algorithm 1, Option II), as in Flower's FedTrimmedAvg. It is robust against m
    clients. Weights are not used. `beta = 0` gives FedAvg with uniform weights for float tensors.

    beta: the share that is left out at each end, below 1/2. The default, 0.34, leaves out one of three clients at each
    end
    """

    beta: Annotated[float, Field(ge=0, lt=0.5)] = 0.34
    assumes = (Fact.SEVERAL_CLIENTS, Fact.EVERY_ENTRY)
    breaks = (Fact.WEIGHTED_MEAN, Fact.CLIENT_WEIGHTS, Fact.EVERY_CLIENT)

    def check(self, experiment: Experiment) -> None:
        """Raises UserError for a share that leaves out no client, because the rule would be robust only by its name."""
        count = clients_in_a_round(experiment)
        if count and self.beta > 0 and int(self.beta * count) == 0:
            raise UserError(
                f"method.trimmed_mean.beta = {self.beta:g} leaves out none of {count} clients; it must be at least "
                f"1/{count} (or 0 for the uniform mean)"
            )

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The trimmed mean of the updates. Every client has 1/K in its weight column."""
        equal_columns(updates, server)
        return trimmed_mean([update.arrays for update in updates], int(self.beta * len(updates)))
