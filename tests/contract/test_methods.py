"""Every row of METHODS has the same properties. A new row is tested here automatically; it needs no new test file."""

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from exchange_tables import TABLES, off_the_table

from clients.parts import Term
from fedsim.commands.methods import show_findings
from fedsim.common.errors import UserError
from fedsim.methods import table as methods
from fedsim.methods.recipe import Recipe
from fedsim.methods.registry import FOLDERS
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name
from fedsim.runtime import watched
from fedsim.testing import contract
from fedsim.testing.contract import findings, small_plan

# Fewer images, rounds and steps than `fedsim check-method` takes.
FEW = ["data.fraction=0.05", "train.rounds=2", "train.iterations=2"]
COMBINATIONS = ["gperxan+feddg-ga", "fedprox+fedbn", "feddg-ga+fedprox"]


@pytest.fixture(scope="module", autouse=True)
def one_other_process() -> Iterator[None]:
    """One process finishes the runs of all rows; `fedsim check-method` starts one for each, which takes longer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedsim.testing.contract"])
    with ProcessPoolExecutor(1, context) as other, pytest.MonkeyPatch.context() as patch:

        def finish(plan):
            settings = plan.experiment.toml()
            other.submit(contract._finish, settings, dict(os.environ), sys.path, str(Path.cwd())).result()

        patch.setattr(contract, "_finish_elsewhere", finish)
        yield


def new_parts() -> dict[str, set[str]]:
    """{row: the slots in which it has a kind of part that no row before it has}."""
    seen, found = {}, {}
    for name, recipe in METHODS.items():
        own = {type(part): slot for slot, part in recipe.pairs}
        found[name] = {slot for kind, slot in own.items() if kind not in seen} if seen else set(own.values())
        seen |= own
    return found


NEW = new_parts()
SERVER = {slot for slot, folder in FOLDERS.items() if folder.startswith("strategies")}


def properties(method: str) -> list:
    """The properties that the parts of a row may break: all where they are new, few where other rows have them."""
    own = NEW.get(method, set())
    left_out = {contract.survives} if not own & SERVER else set()
    left_out |= {contract.resumes_elsewhere, contract.replies_alone, contract.stays_on_one_device} if not own else set()
    tables = [off_the_table] if method in TABLES else []
    return [check for check in contract.PROPERTIES if check not in left_out] + tables


@pytest.mark.parametrize("method", [*METHODS, *COMBINATIONS])
def test_contract(method, monkeypatch):
    """The row has the properties of fedsim/testing/contract.py, and its messages are those of its table.

    Clients reply alone in reverse order; where a new part may keep state, also in processes of their own."""
    monkeypatch.setattr(contract, "PROPERTIES", properties(method))
    if not NEW.get(method, set()) & {"banks", "companions", "client"}:
        monkeypatch.setattr(watched, "reason_against", lambda experiment: "nothing is kept")
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
    "rfa", "centered-clipping", "term", "fedasam", "fedasam-swa", "fedheal", "dsu", "fedfa", "fedrdn",
]  # fmt: skip
MASKS = [
    "data.dataset=digit-masks", 'data.domains=["inverted", "noise", "shaded", "textured"]', "run.target=textured",
    "model.backbone=unet-small",
]  # fmt: skip


@pytest.mark.parametrize("method", [*MASKED, *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO_MASKED)])
def test_contract_on_masks(method):
    broken = {words: reason for words, reason in findings(method, [*MASKS, *FEW]) if reason}
    assert broken == {}


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {*MASKED, *ALSO_MASKED}))
def test_refused_on_masks(method, tmp_path):
    with pytest.raises(UserError, match="is made for classification, and digit-masks is a data set for segm") as error:
        small_plan(method, tmp_path, MASKS)
    assert len(str(error.value).splitlines()) == 1
    parts = [part_name(part) for _, part in METHODS[method].pairs]
    assert any(name in str(error.value) for name in parts)


FIRST = {}


@dataclass(frozen=True)
class Remembering(Term):
    """The first client of a round, by a variable of the module, has a loss of its own."""

    def begin(self, round):
        if FIRST.get("round") != round.round:
            FIRST.update(round=round.round, client=round.client)
        return (lambda batch: batch.logits.square().mean()) if FIRST["client"] == round.client else None


@dataclass(frozen=True)
class OnTheCPU(Term):
    """Weights of the batch's images that no GPU has."""

    def begin(self, round):
        return lambda batch: (batch.logits.square().mean(1) * torch.ones(len(batch.logits))).mean()


@pytest.mark.parametrize(("part", "check", "said"), [
    (Remembering(), contract.replies_alone, ".*is another in a process of its own"),
    (OnTheCPU(), contract.stays_on_one_device,
     r".*aten::mul has tensors on the run's device and on the CPU, \(16,\)$"),
])  # fmt: skip
def test_a_part_that_remembers_in_a_variable_or_leaves_a_tensor_on_the_cpu_fails(monkeypatch, part, check, said):
    monkeypatch.setitem(methods.METHODS, "wrong", Recipe(terms=(part,), paper="none"))
    monkeypatch.setattr(contract, "PROPERTIES", (check,))
    ((_, reason),) = findings("wrong", FEW)
    assert re.match(said, reason)


def test_a_row_is_not_compared_where_fedavg_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(contract, "PROPERTIES", (contract.trains, contract.differs_from_fedavg))
    assert show_findings("fedclip", [*METHODS["promptfl"].tried_with, *FEW])
    marks = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert marks.keys() == {"holds", "skipped"}
    assert "It differs from FedAvg" in marks["skipped"]
    assert "refused with these settings: model.train = 'head' trains nothing" in marks["skipped"]
