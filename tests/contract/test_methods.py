"""Every row of METHODS keeps the same promises. A new method is a new row here by itself, not a new test file."""

from dataclasses import dataclass

import pytest

from clients.parts import Term
from fedsim import methods
from fedsim.contract import findings
from fedsim.methods import METHODS
from fedsim.recipe import Recipe

COMBINATIONS = ["gperxan+feddg-ga", "fedprox+fedbn", "feddg-ga+fedprox"]


@pytest.mark.parametrize("method", [*METHODS, *COMBINATIONS])
def test_contract(method):
    """All properties of fedsim/contract.py."""
    broken = {words: reason for words, reason in findings(method) if reason}
    assert broken == {}


# A recipe of each kind that makes sense without classes.
MASKED = [
    "fedavg", "fedprox", "scaffold", "ditto", "fedbn", "silobn", "gperxan", "feddg-ga", "ccst", "elcfs", "fedadam",
    "krum", "deepall",
]  # fmt: skip
MASKS = [
    "data.dataset=digit-masks", 'data.domains=["inverted", "noise", "shaded", "textured"]', "run.target=textured",
    "model.backbone=unet-small",
]  # fmt: skip


@pytest.mark.parametrize("method", MASKED)
def test_contract_on_masks(method):
    """All properties on digit masks, where the task is segmentation."""
    broken = {words: reason for words, reason in findings(method, MASKS) if reason}
    assert broken == {}


@dataclass(frozen=True)
class Idle(Term):
    """A term that adds nothing."""

    def begin(self, round):
        """No term."""
        return


def test_an_inert_method_fails(monkeypatch):
    """A row that is FedAvg in all but its name."""
    monkeypatch.setitem(methods.METHODS, "idle", Recipe(terms=(Idle(),), paper="none"))
    found = dict(take(findings("idle"), 2))
    assert [words for words, reason in found.items() if "does nothing" in reason]


def take(values, count):
    """The first values."""
    return [value for value, _ in zip(values, range(count))]
