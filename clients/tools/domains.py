"""What terms that compare domains have in common: the examples of each domain in a batch, and a penalty's weight."""

import itertools
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.local_data import on_device
from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.parts.facts import Fact

FIRST_WEIGHT = 1.0  # of a penalty, before it has its own


def rows_of_domains(round: LocalRound, batch: Batch, least: int = 1) -> dict[int, np.ndarray]:
    """{domain: rows of its examples in the batch} for each domain with at least `least` rows; empty for one domain.

    A domain is a number of `round.data.domains`. The batch is as it came from the data: row i is that of position i.
    """
    domains = round.data.domains[batch.positions]
    rows = {int(domain): np.flatnonzero(domains == domain) for domain in np.unique(domains)}
    enough = {domain: where for domain, where in rows.items() if len(where) >= least}
    return enough if len(enough) > 1 else {}


def several_domains(round: LocalRound) -> bool:
    """Whether the client has training examples of more than one domain."""
    return len(np.unique(round.data.domains)) > 1


def by_domain(round: LocalRound, batch: Batch, values: Tensor, least: int = 1) -> list[Tensor]:
    """The rows of `values` [B, ...] of each domain of the batch; empty where it has fewer than two domains."""
    return [values[on_device(rows, values.device)] for rows in rows_of_domains(round, batch, least).values()]


def risks(round: LocalRound, batch: Batch) -> dict[int, Tensor]:
    """{domain: the task's loss on its examples in the batch}, a scalar R_e; empty where there are fewer than two."""
    risks = {}
    for domain, rows in rows_of_domains(round, batch).items():
        index = on_device(rows, batch.logits.device)
        risks[domain] = round.task.loss(batch.logits[index], batch.truth[index])
    return risks


class DomainTerm(Term):
    """A term that compares the domains of a batch. It adds nothing on a client that has one domain."""

    assumes = (Fact.ROWS, Fact.HARD_LABELS, Fact.DOMAINS_TOGETHER)
    with_one_domain: ClassVar[str] = "it compares domains of one client, so that it adds nothing"


@dataclass(frozen=True)
class AnnealedPenalty(DomainTerm):
    """lam_t P, where lam_t = 1 in the client's first `anneal_steps` steps of the run, and lam from then on.

    At that step the optimizer loses its moments. A client with one domain adds 0.

    lam: the weight of the penalty P; 0 leaves it out from the start
    anneal_steps: the number of local steps, counted over the rounds, in which the weight is 1
    """

    lam: Annotated[float, Field(ge=0)] = 1.0
    anneal_steps: Annotated[int, Field(ge=0)] = 500

    def penalty(self, round: LocalRound, batch: Batch) -> Tensor | None:
        """P of a batch, a scalar; None where the batch has fewer than two domains."""
        raise NotImplementedError

    @property
    def entry(self) -> str:
        """The store's entry for the number of steps that were taken."""
        return f"{type(self).__name__}-steps"

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The weighted penalty, or None when lam is 0 or the client has one domain."""
        if self.lam == 0 or not several_domains(round):
            return None
        numbers = itertools.count(self._steps_before(round))

        def term(batch: Batch) -> Tensor:
            number = batch.once(self.entry, lambda: next(numbers))
            if number == self.anneal_steps > 0:
                round.optimizer.state.clear()
            penalty = self.penalty(round, batch)
            if penalty is None:
                return batch.logits.new_zeros(())
            return (FIRST_WEIGHT if number < self.anneal_steps else self.lam) * penalty

        return term

    def end(self, round: LocalRound) -> None:
        """Stores the number of steps up to now, where there is a penalty."""
        if self.lam and several_domains(round):
            round.store.put(self.entry, {"steps": torch.tensor(self._steps_before(round) + round.steps)})

    def _steps_before(self, round: LocalRound) -> int:
        stored = round.store.get(self.entry)
        return int(stored["steps"]) if stored else 0
