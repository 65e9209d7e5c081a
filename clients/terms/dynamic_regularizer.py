"""FedDyn's client term: it pulls the model towards the received one, corrected by the client's own past moves."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from clients.parts import LocalRound, Term
from fedsim.common.tasks import ANY_TASK
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned

OWN = "past-moves"  # the store's entry for h_k


@dataclass(frozen=True)
class DynamicRegularizer(Term):
    """The optimizer gets u = g + lam (w - theta + h_k) in place of the gradient g, over the shared parameters.

    h_k is the sum of the client's own past moves theta_k - theta, and starts at 0.

    Source: FedDyn (Acar et al., ICLR 2021), in the form of the released code, which has the paper's linear term in
    units of the parameters. The term belongs together with the server's part `dynamic_correction`, which every method
    with this term has. `lam = 0` leaves the gradients unchanged, but the server's part still acts, so that it is not
    FedAvg. A client that has lost its stored state is an error: the run stops, or goes on without this client with
    `run.on_client_failure = "continue"`.

    lam: the strength. The released scripts have 0.1, the paper tries 0.1, 0.01 and 0.001
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    order: ClassVar[int] = 1

    side_by_side: ClassVar[bool] = True

    lam: Annotated[float, Field(ge=0), Tuned("0.001,0.01,0.1", "the paper")] = 0.1
    requires: ClassVar[dict[str, str]] = {"refine": "dynamic_correction"}
    assumes = (Fact.WHOLE_MODEL,)

    def begin(self, round: LocalRound) -> None:
        """Registers the pull, which is added to the gradients before every step. It adds nothing to the loss."""
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
                gradients = [grad for name in moving if (grad := parameters[name].grad) is not None]
                torch._foreach_add_(gradients, away, alpha=self.lam)

        if self.lam > 0:
            round.before_step.append(pull)

    def end(self, round: LocalRound) -> None:
        """Stores h_k with the move of this round."""
        start, past = round.scratch[OWN]
        moved = {name: parameter.detach() - start[name] for name, parameter in round.shared_parameters().items()}
        round.store.put(OWN, {name: past[name] + move for name, move in moved.items()})
