"""Rows whose server parts refuse what one client sends, each at another moment of the round."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from clients.parts import Term, Unlabelled
from fedsim.methods.recipe import Recipe
from strategies.parts import Bank, RefusedUpdateError, Visit

VICTIM, REASON = "rot15", "its sum is negative"


@dataclass(frozen=True)
class Before(Bank):
    """One number of each client, collected before training; `merge` refuses that of the victim."""

    name: ClassVar[str] = "sums"
    when: ClassVar[str] = "before"

    def accept(self, client, arrays, server):
        return ""

    def hand_out(self, bank, client, server):
        return None

    def merge(self, bank, entries, server):
        """The newest ones; the part's state must not count a merge that was refused."""
        server.state["merges"] = server.state.get("merges", 0) + 1
        if VICTIM in entries:
            raise RefusedUpdateError(VICTIM, REASON)
        return {**bank, **entries}


@dataclass(frozen=True)
class After(Before):
    """Collected after training."""

    when: ClassVar[str] = "after"


@dataclass(frozen=True)
class Sum(Term):
    """Contributes -1 on the victim, 1 elsewhere, when it is asked for."""

    bank: ClassVar[str] = "sums"

    def begin(self, round):
        return None

    def collect(self, round):
        return {"v": np.float32([-1 if round.client == VICTIM else 1])}


@dataclass(frozen=True)
class Answer(Unlabelled):
    """The unseen domain's client answers with one number."""

    def answer(self, round):
        round.send("answer", {"v": torch.ones(1)})


@dataclass(frozen=True)
class Look(Visit):
    """A visit whose answer `take` refuses, after the part's state was changed."""

    phase: ClassVar[str] = "look"
    moment: ClassVar[str] = "model"
    records: ClassVar[tuple[str, ...]] = ("answer",)
    bank: ClassVar[str] = "answer"

    def ask(self, model, server):
        return {"arrays": {**server.previous, **model}}

    def take(self, records, model, server):
        server.state["taken"] = 1
        raise RefusedUpdateError(server.experiment.run.target, REASON)


@dataclass(frozen=True)
class Needing(Term):
    """Declares a metric that no client reports."""

    needs: ClassVar[tuple[str, ...]] = ("no_such_number",)

    def begin(self, round):
        return None


before = Recipe(banks=(Before(),), terms=(Sum(),))
after = Recipe(banks=(After(),), terms=(Sum(),))
visit = Recipe(visits=(Look(),), unlabelled=Answer())
needing = Recipe(terms=(Needing(),))
