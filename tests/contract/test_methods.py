"""Every row of METHODS has the same properties. A new row is tested here automatically; it needs no new test file."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from clients.parts import Term
from fedsim.commands import contract
from fedsim.commands.contract import findings, small_plan
from fedsim.commands.methods import show_findings
from fedsim.common.errors import UserError
from fedsim.methods import table as methods
from fedsim.methods.recipe import Recipe, parts_of
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name

# Half of the images that `fedsim check-method` takes, and so half of the steps.
FEW = ["data.fraction=0.05"]
COMBINATIONS = ["gperxan+feddg-ga", "fedprox+fedbn", "feddg-ga+fedprox"]


@pytest.fixture(scope="module", autouse=True)
def one_other_process() -> Iterator[None]:
    """One process finishes the runs of all rows; `fedsim check-method` starts one for each, which takes longer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedsim.commands.contract"])
    with ProcessPoolExecutor(1, context) as other, pytest.MonkeyPatch.context() as patch:

        def finish(plan):
            settings = plan.experiment.toml()
            other.submit(contract._finish, settings, dict(os.environ), sys.path, str(Path.cwd())).result()

        patch.setattr(contract, "_finish_elsewhere", finish)
        yield


@pytest.mark.parametrize("method", [*METHODS, *COMBINATIONS])
def test_contract(method):
    """The row has all properties of fedsim/commands/contract.py."""
    broken = {words: reason for words, reason in findings(method, FEW) if reason}
    assert broken == {}


# Rows that work on masks. FedAvg and ELCFS, whose paper is about them, are in every run of the tests; the others are in
# `pytest -m slow`.
MASKED = ["fedavg", "elcfs"]
ALSO_MASKED = [
    "gperxan", "feddg-ga",
    "scaffold", "fedbn", "ccst", "fedadam", "deepall", "fedprox", "ditto", "silobn", "krum", "mixstyle", "gfedavg",
    "gfedavg-ibn", "gfedavg-dson", "fedavgm", "fedyogi",
    "fedadagrad", "qfedavg", "fednova", "fedomg", "feddyn", "fedcm", "fedsam", "mofedsam", "fedlesam", "fedlesam-s",
    "fedlesam-d", "fedgala", "fedgma", "afl", "mixup",
]  # fmt: skip
MASKS = [
    "data.dataset=digit-masks", 'data.domains=["inverted", "noise", "shaded", "textured"]', "run.target=textured",
    "model.backbone=unet-small",
]  # fmt: skip


@pytest.mark.parametrize("method", [*MASKED, *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO_MASKED)])
def test_contract_on_masks(method):
    """The row has all properties on digit masks too, where the task is segmentation."""
    broken = {words: reason for words, reason in findings(method, [*MASKS, *FEW]) if reason}
    assert broken == {}


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {*MASKED, *ALSO_MASKED}))
def test_refused_on_masks(method, tmp_path):
    """Every other row is refused in one line, which names the part that needs classes and the task."""
    with pytest.raises(UserError, match="is made for classification, and digit-masks is a data set for segm") as error:
        small_plan(method, tmp_path, MASKS)
    assert len(str(error.value).splitlines()) == 1
    parts = [part_name(part) for _, part in parts_of(METHODS[method])]
    assert any(name in str(error.value) for name in parts)


@dataclass(frozen=True)
class Idle(Term):
    """A term that adds nothing."""

    def begin(self, round):
        """No term."""
        return


def test_an_inert_method_fails(monkeypatch):
    """A row that differs from FedAvg only in its name, and in the settings that both have in a try, is refused."""
    idle = Recipe(terms=(Idle(),), paper="none", tried_with=("model.backbone=digits-cnn",))
    monkeypatch.setitem(methods.METHODS, "idle", idle)
    found = dict(take(findings("idle", FEW), 2))
    assert [words for words, reason in found.items() if "does nothing" in reason]


FIRST = {}


@dataclass(frozen=True)
class Remembering(Term):
    """The first client of a round, by a variable of the module, has a loss of its own."""

    def begin(self, round):
        """The term of the first client."""
        if FIRST.get("round") != round.round:
            FIRST.update(round=round.round, client=round.client)
        return (lambda batch: batch.logits.square().mean()) if FIRST["client"] == round.client else None


def test_a_part_that_remembers_in_a_variable_fails(monkeypatch):
    """In one process a single client has the term, and in processes of their own all have it."""
    monkeypatch.setitem(methods.METHODS, "remembering", Recipe(terms=(Remembering(),), paper="none"))
    monkeypatch.setattr(contract, "PROPERTIES", (contract.replies_alone,))
    ((_, reason),) = findings("remembering", FEW)
    assert "is another in a process of its own" in reason


def test_a_row_is_not_compared_where_fedavg_is_refused(monkeypatch, capsys):
    """FedAvg has nothing to learn with fixed texts: `fedsim check-method` says so, and the other properties hold."""
    monkeypatch.setattr(contract, "PROPERTIES", (contract.trains, contract.differs_from_fedavg))
    assert show_findings("fedclip", [*METHODS["promptfl"].tried_with, *FEW])
    marks = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert marks.keys() == {"holds", "skipped"}
    assert "It differs from FedAvg" in marks["skipped"]
    assert "refused with these settings: model.train = 'head' trains nothing" in marks["skipped"]


def take(values, count):
    """The first values."""
    return [value for value, _ in zip(values, range(count))]
