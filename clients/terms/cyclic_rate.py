"""The learning rate of stochastic weight averaging: it falls within each cycle of rounds, and begins again."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from clients.parts import LocalRound, Term
from fedsim.common.tasks import ANY_TASK
from fedsim.settings.tuned import Tuned


@dataclass(frozen=True)
class CyclicRate(Term):
    """lr <- lr (1 + t (low - 1)), t = (j + 1) / c, where j is r modulo c, in the rounds r = 0, 1, ... after `after`.

    Source: FedASAM with SWA (Caldarola et al., ECCV 2022). The formula is that of the released code
    (debcaldarola/fedsam 904b031). The lowest rate is that of the round that the part `server_average` adds to its mean,
    whose `after` and `cycle` follow from this part, as in stochastic weight averaging. In the code r counts from the
    first round of the run, and a model is added where r - start is a multiple of c. With the script's start, a multiple
    of c too, that is the round after the lowest rate, with nearly the highest one. lr is the rate of the schedule. The
    part adds nothing to the loss. `low = 1` changes nothing.

    after: the share of the rounds before the first cycle
    cycle: c, the number of rounds of a cycle. The code's script for CIFAR-10 has 10 in 10,000 rounds, and its default
    is 1; 5 is ours, for runs of tens of rounds
    low: the rate of the last round of a cycle, divided by that of the schedule
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False
    order: ClassVar[int] = -1  # what other parts read of the rate is the cycle's

    after: Annotated[float, Field(ge=0, lt=1)] = 0.75
    cycle: Annotated[int, Field(ge=1)] = 5
    low: Annotated[float, Field(gt=0, le=1), Tuned("0.01,0.1,1", "ours: around the released code's 0.01")] = 0.01
    requires: ClassVar[dict[str, str]] = {"refine": "server_average"}

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """The same rounds for the average, with equal weights."""
        return {"server_average": {"running": True, "after": self.after, "cycle": self.cycle}}

    @property
    def depends_on_rounds(self) -> bool:
        """The first cycle begins after a share of all rounds."""
        return self.after > 0

    def factor(self, number: int, rounds: int) -> float:
        """By what the rate of round `number` (from 1) of so many rounds is multiplied."""
        passed = number - 1 - int(self.after * rounds)
        if passed < 0:
            return 1.0
        t = (passed % self.cycle + 1) / self.cycle
        return 1 - t + t * self.low

    def begin(self, round: LocalRound) -> None:
        """Multiplies the learning rates of the round."""
        factor = self.factor(round.round, round.rounds)
        round.lr *= factor
        for group in round.optimizer.param_groups:
            group["lr"] *= factor
