"""A learning rate of the server: how far the global model moves towards the fused one."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from fedsim.settings.tuned import DECADE, Tuned
from strategies.parts import ArrayDict, Arrays, Refine, ServerRound


@dataclass(frozen=True)
class ServerStep(Refine):
    """theta <- theta + eta (fused - theta) for parameters; all other tensors take their fused value.

    theta is the model at the start of the round. `eta = 1` gives the fused model (FedAvg).

    Source: Reddi et al., ICLR 2021 (FedOpt with SGD as server optimizer). It is eta_g of SCAFFOLD, FedOMG and others.

    eta: the server's learning rate, above 0; above 1 the step goes beyond the clients' average
    """

    eta: Annotated[float, Field(gt=0), Tuned("log:0.1:10", DECADE)] = 1.0
    assumes = ()

    def refine(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """The step in float64, cast back to each tensor's type."""
        if self.eta == 1:
            return dict(fused)
        moved = {}
        for name in sorted(server.parameters & fused.keys()):
            start = np.asarray(server.previous[name], np.float64)
            moved[name] = np.asarray(start + self.eta * (fused[name] - start), dtype=fused[name].dtype)
        return {**fused, **moved}
