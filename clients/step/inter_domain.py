"""Fish's step: an inner step on each domain, then the model moves a part of the way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, Step, StepFunction
from clients.tools.domains import rows_of_domains
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned


def interpolate(state: Mapping[str, Tensor], before: Mapping[str, Tensor], share: float) -> None:
    """theta <- before + share (theta - before), in place, for floating-point tensors; integers stay as they are."""
    with torch.no_grad():
        for name, tensor in before.items():
            state[name].copy_(tensor + share * (state[name] - tensor))


@dataclass(frozen=True)
class InterDomain(Step):
    """theta <- theta + meta_lr * (theta' - theta), theta' being theta after an optimizer's step on R_e of each domain.

    To first order this maximizes the inner products of the domains' gradients. Source: Fish (Shi et al., ICLR 2022).
    R_e is the loss on domain e in the batch, with the recipe's terms. The interpolation acts on the whole state, with
    running statistics, as in DomainBed. The optimizer keeps its moments over the steps of a round. The domains come in
    a new order in each step, as the released code draws them (YugeTen/fish 333efa2); `order = "fixed"` is DomainBed's.
    A domain with one example in a batch is left out of it, because batch norm needs two. A batch of one domain gives
    FedAvg's step.

    meta_lr: the share of the way that the model moves; the released code divides its own by the number of domains
    order: whether the domains of each step come in a new order
    """

    assumes = ()
    breaks = (Fact.DOMAINS_TOGETHER, Fact.ONE_STEP)
    with_one_domain = "it goes through domains of one client, so that it is FedAvg's step"

    meta_lr: Annotated[float, Field(gt=0, le=1), Tuned("0.05,0.1,0.5", "DomainBed")] = 0.5
    order: Literal["shuffled", "fixed"] = "shuffled"

    def begin(self, round: LocalRound) -> StepFunction:
        """The inner steps and the interpolation."""
        rng = round.rng("inter-domain")

        def step(batch: Batch) -> Tensor:
            rows = list(rows_of_domains(round, batch, 2).values())
            if not rows:
                return round.move(lambda: round.loss_of(batch))
            state = round.state_of()
            before = {name: value.clone() for name, value in state.items() if value.is_floating_point()}
            order = rng.permutation(len(rows)) if self.order == "shuffled" else range(len(rows))
            losses = [self._inner_step(round, batch.part(rows[place])) for place in order]
            interpolate(state, before, self.meta_lr)
            return torch.stack(losses).mean()

        return step

    def _inner_step(self, round: LocalRound, batch: Batch) -> Tensor:
        return round.move(lambda: round.loss_of(batch))
