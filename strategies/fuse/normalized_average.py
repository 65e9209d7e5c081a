"""FedNova: each client's move is divided by its number of gradients, so that more steps give no more weight."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedsim.common.errors import UserError
from fedsim.settings.experiment import Experiment
from strategies.aggregate import weighted_mean
from strategies.parts import ArrayDict, Fuse, RefusedUpdateError, ServerRound, Update
from strategies.tools.moves import mean_move, moved, moves


@dataclass(frozen=True)
class NormalizedAverage(Fuse):
    """theta <- theta + tau_eff sum_k p_k delta_k / a_k, with tau_eff = sum_k p_k a_k.

    Source: FedNova (Wang et al., NeurIPS 2020). delta_k = theta_k - theta on the shared parameters; all other tensors
    take their weighted mean. a_k comes from the client (part `gradient_count`): it is the number of its steps with
    plain SGD, more with momentum, and less with a proximal term; `fednova+fedprox` is the proximal solver. The official
    code's momentum on the server (gmf, off by default) is the part `fed_avg_m`. The rule matters where clients take
    different numbers of steps; with equal numbers it is FedAvg up to rounding.

    tau_eff: `gradients` as above; `steps` takes sum_k p_k tau_k, as the official code does with a proximal term
    """

    tau_eff: Literal["gradients", "steps"] = "gradients"
    requires: ClassVar[dict[str, str]] = {"reports": "gradient_count"}
    needs: ClassVar[tuple[str, ...]] = ("gradient_count", "steps")
    amplifies: ClassVar[bool] = True

    def check(self, experiment: Experiment) -> None:
        """Raises UserError where a reply's steps are not those of the model in it."""
        if self.tau_eff == "steps" and experiment.train.local_checks:
            raise UserError("tau_eff = 'steps' counts all steps of a round, and train.local_checks sends an earlier "
                            "model; use tau_eff = 'gradients', or set train.local_checks = 0")  # fmt: skip

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The fused model. A client with a count that is not above 0 is refused."""
        shares = [weights[update.client] for update in updates]
        counts = [update.metrics["gradient_count"] for update in updates]
        for update, count in zip(updates, counts, strict=True):
            if not count > 0:
                raise RefusedUpdateError(update.client, f"its gradient_count is {count:g}, not above 0")
        units = counts if self.tau_eff == "gradients" else [update.metrics["steps"] for update in updates]
        tau = math.fsum(share * unit for share, unit in zip(shares, units, strict=True))
        coefficients = [tau * share / count for share, count in zip(shares, counts, strict=True)]
        fused = weighted_mean([update.arrays for update in updates], shares)
        deltas = moves(updates, server)
        for name in deltas[0]:
            fused[name] = moved(name, mean_move(deltas, coefficients, name), server)
        return fused
