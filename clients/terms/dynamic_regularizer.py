"""FedDyn's client: a pull towards the received model, corrected by the client's own past moves."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from clients.parts import LocalRound, Term

OWN = "past-moves"  # store entry of h_k


@dataclass(frozen=True)
class DynamicRegularizer(Term):
    """The optimizer gets u = g + lam (w - theta + h_k), over the shared parameters;  h_k is the sum of the client's own
    past moves theta_k - theta and starts at 0.

    FedDyn (Acar et al., ICLR 2021), frontier.md 2, in the released code's form (the paper's linear term in units of the
    parameters). It belongs to the server's part `dynamic_correction`, without which clients are drawn back for ever.
    `lam = 0` leaves the gradients alone; FedAvg needs the server's part taken out too. A client whose stored state is
    lost starts again with h_k = 0.

    lam: strength; .1 in the released scripts, the paper tries .1, .01 and .001
    """

    lam: Annotated[float, Field(ge=0)] = 0.1
    requires: ClassVar[dict[str, str]] = {"refine": "dynamic_correction"}
    whole: ClassVar[bool] = True

    def begin(self, round: LocalRound) -> None:
        """Adds to the gradients before every step; there is nothing to add to the loss."""
        if round.phase != "train":
            return
        parameters, kept = round.shared_parameters(), round.store.get(OWN) or {}
        start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        past = {name: kept.get(name, torch.zeros_like(value)).to(round.device) for name, value in start.items()}
        anchor = {name: value - past[name] for name, value in start.items()}
        round.scratch[OWN] = (start, past)

        def pull() -> None:
            moving = [name for name, parameter in parameters.items() if parameter.grad is not None]
            if moving:
                places = [parameters[name].detach() for name in moving]
                away = torch._foreach_sub(places, [anchor[name] for name in moving])
                torch._foreach_add_([parameters[name].grad for name in moving], away, alpha=self.lam)

        if self.lam > 0:
            round.before_step.append(pull)

    def end(self, round: LocalRound) -> None:
        """Keeps h_k with this round's move."""
        if round.phase == "train":
            start, past = round.scratch[OWN]
            moved = {name: parameter.detach() - start[name] for name, parameter in round.shared_parameters().items()}
            round.store.put(OWN, {name: past[name] + move for name, move in moved.items()})
