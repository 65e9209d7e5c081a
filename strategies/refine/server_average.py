"""An average of the global model over the rounds, for evaluation; the clients continue with the newest model."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from fedsim.settings.effect import Only
from fedsim.settings.tuned import Tuned
from strategies.parts import ArrayDict, Arrays, Refine, ServerRound


@dataclass(frozen=True)
class ServerAverage(Refine):
    """a_t = beta a_(t-1) + (1 - beta) theta_t for floating-point tensors; a = theta in the first averaged round.

    beta: the decay of the exponential moving average, in [0, 1). 0 gives theta_t, the model of the method (FedAvg)
    running: takes the mean of all averaged rounds (beta_t = (n - 1)/n at the n-th), as stochastic weight averaging does
    (Izmailov et al., UAI 2018); beta is not used then
    first_round: the average begins with this round; until then the model is theta_t
    after: the average begins after this share of the rounds, if that is later; 0.75 in FedASAM's SWA
    cycle: of the rounds from there on, the last one of every `cycle` is averaged, and the average stays in between

    The average is evaluated, compared for the best round, and saved. Clients continue from theta_t, which is kept in
    the checkpoint. Batch-norm statistics are averaged like the weights; integer counters are the newest. This part
    comes after all other refining parts.
    """

    beta: Annotated[
        float, Field(ge=0, lt=1), Only(running=False), Tuned("0.5,0.9,0.99", "DomainBed (MTL's average)")
    ] = 0.9
    running: bool = False
    first_round: Annotated[int, Field(ge=1)] = 1
    after: Annotated[float, Field(ge=0, lt=1)] = 0.0
    cycle: Annotated[int, Field(ge=1)] = 1
    order: ClassVar[int] = 4
    assumes = ()

    @property
    def depends_on_rounds(self) -> bool:
        """The first averaged round is a share of all rounds."""
        return self.after > 0

    def refine(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """Keeps theta_t and returns the average; sums are kept in float64."""
        server.arrays.update({f"theta:{name}": np.array(array) for name, array in fused.items()})
        passed = server.round - max(self.first_round, math.floor(self.after * server.rounds) + 1) + 1
        if passed < 1 or passed % self.cycle:
            return {**fused, **self._average(fused, server)}
        count = server.state["count"] = server.state.get("count", 0) + 1
        beta = (count - 1) / count if self.running else self.beta
        for name in [name for name, array in fused.items() if array.dtype.kind == "f"]:
            theta = np.asarray(fused[name], np.float64)
            before = server.arrays.get(f"mean:{name}", theta)
            server.arrays[f"mean:{name}"] = beta * before + (1 - beta) * theta if beta else theta
        return {**fused, **self._average(fused, server)}

    def _average(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """The average so far, in the types of the model; empty before there is one."""
        means = {name: server.arrays.get(f"mean:{name}") for name in fused}
        return {name: np.asarray(mean, fused[name].dtype) for name, mean in means.items() if mean is not None}

    def start(self, model: Arrays, server: ServerRound) -> Arrays:
        """theta_t, from which the clients continue."""
        averages = {name.removeprefix("theta:"): array for name, array in server.arrays.items() if name[:6] == "theta:"}
        return {**model, **averages} if averages else model
