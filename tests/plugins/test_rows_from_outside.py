"""A row from outside is checked slot by slot, and its server parts may refuse what one client sent at any moment."""

import re
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from support import interrupt, run_small, small_experiment

from clients.objective.consistent_views import ConsistentViews
from clients.parts import Term, Unlabelled
from clients.reports.generalization_gap import GeneralizationGap
from clients.terms.proximal import Proximal
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.methods import table as methods
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.methods.compatibility import check_recipe
from fedsim.methods.recipe import Recipe
from fedsim.methods.registry import find_row
from fedsim.methods.table import METHODS
from fedsim.methods.variants import method_label
from fedsim.runs.checkpoint import load_checkpoint
from fedsim.runs.plan import resolve
from fedsim.settings.experiment import Experiment
from fedsim.testing.contract import findings
from strategies.parts import Bank, RefusedUpdateError, Visit
from strategies.weights.generalization_adjustment import GeneralizationAdjustment


@dataclass
class Loose(Term):
    weight: float = 0.1


@dataclass(frozen=True)
class WithList(Term):
    layers: list = field(default_factory=list)


@pytest.fixture
def row(monkeypatch):
    """A function that makes a recipe known as `mine`."""
    return lambda **slots: monkeypatch.setitem(methods.METHODS, "mine", Recipe(**slots, paper="a test"))


@pytest.mark.parametrize(("slots", "said"), [
    ({"terms": (Loose(),)}, "terms: Loose is not a frozen dataclass; write @dataclass(frozen=True)"),
    ({"terms": (WithList(),)}, "WithList.layers is a list"),
    ({"terms": Proximal()}, "terms takes a tuple of parts, and the row has Proximal(); write (Proximal(),)"),
    ({"step": ConsistentViews}, "step has the class ConsistentViews where a part is needed"),
    ({"terms": (GeneralizationGap(),)}, "terms has GeneralizationGap(), which does not fit; it is for reports"),
    ({"step": None}, "step has NoneType"),
    ({"norm": "ibn"}, "norm has str, which does not fit; it is no part"),
])  # fmt: skip
def test_what_no_recipe_can_hold_is_one_line(row, slots, said, tmp_path):
    row(**slots)
    for use in (lambda: resolve(small_experiment(tmp_path, "mine")), lambda: list(findings("mine"))):
        with pytest.raises(UserError, match=rf"\Amethod 'mine': .*{re.escape(said)}.*\Z"):
            use()


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
        server.state["merges"] = server.state.get("merges", 0) + 1
        if VICTIM in entries:
            raise RefusedUpdateError(VICTIM, REASON)
        return {**bank, **entries}


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


def bank(record: str, title: str = "A") -> Bank:
    """A bank with that record, of a class with that name."""
    return type(title, (Bank,), {"name": record, "when": "round"})()


@pytest.mark.parametrize(("slots", "said"), [
    ({"banks": (bank("sums", "A"), bank("sums", "B")), "terms": (Sum(),)}, "a and b are banks of one name, 'sums'"),
    ({"banks": (bank("sums"),), "terms": (Sum(), type("OtherSum", (Sum,), {})())},
     "sum and other_sum contribute to one name"),
    *(({"banks": (bank(name),)}, f"{name!r}, which is another") for name in ("arrays", "metrics", "state")),
    ({"banks": (type("A", (Bank,), {})(),)}, "has no `name`"),
    ({"visits": (Look(), type("LookAgain", (Look,), {})()), "unlabelled": Answer()}, "two visits are called 'look'"),
])  # fmt: skip
def test_one_record_has_one_writer(slots, said):
    """Of two, the later would replace the first."""
    with pytest.raises(UserError, match=rf"\A.*{said}.*\Z"):
        check_recipe(Recipe(**slots), "mine")


def test_a_list_is_a_tuple_and_added_parts_are_checked_too(row):
    """Combinations in either order work as with a tuple; a row that fits is not changed."""
    row(weights=GeneralizationAdjustment(), reports=[GeneralizationGap()], terms=[Proximal()])
    assert find_row("mine").terms == (Proximal(),)
    for name in ("mine", "mine+fedbn", "fedbn+mine", "fedcm+mine"):
        assert Proximal() in find_recipe(name).terms
    assert method_label(small_experiment("out", "mine+fedbn")) == "mine+fedbn"
    assert all(find_row(name) == recipe for name, recipe in METHODS.items() if name != "mine")
    for name, said in (("Loose", "not a frozen dataclass"), ("WithList", r"WithList\.layers is a list")):
        with pytest.raises(UserError, match=said):
            build_recipe(Experiment(method={"name": "fedavg", "add": [f"{__name__}:{name}"]}))


before = Recipe(banks=(Before(),), terms=(Sum(),))
after = Recipe(banks=(type("After", (Before,), {"when": "after"})(),), terms=(Sum(),))
visit = Recipe(visits=(Look(),), unlabelled=Answer())
needing = Recipe(terms=(Needing(),))


def experiment_of(tmp_path, row, failure):
    few = {"data": {"fraction": 0.03, "image_size": 16}, "train": {"rounds": 2}}
    return small_experiment(tmp_path, f"{__name__}:{row}", **few, run={"on_client_failure": failure})


@pytest.mark.parametrize(("row", "victim"), [("before", "rot15"), ("after", "rot15"), ("visit", "rot45")])
def test_the_client_fails_and_the_rest_is_used(tmp_path, row, victim):
    folder = interrupt(experiment_of(tmp_path, row, "continue"), 1)  # so that the round's checkpoint is there
    rows = pd.read_csv(folder / "clients.csv").query("round == 1").set_index("client")
    assert "its sum is negative" in rows.loc[victim, "status"]
    assert (rows.drop(index=victim)["status"] == "ok").all()
    trained = rows["weight"].dropna().index
    assert set(trained) == {"rot0", "rot15", "rot30"} - ({victim} if row != "after" else set())
    state = load_checkpoint(folder / "checkpoint").state.parts
    assert state.get("banks.sums", {}).get("merges", 1) == 1
    assert not state.get("visits.look")


@pytest.mark.parametrize(("row", "said"), [
    ("before", r"'rot15'.*its sum is negative"),
    # `needs` is documented for every part; earlier that of a term or a visit was not looked at
    ("needing", r"missing metrics \['no_such_number'\]"),
])  # fmt: skip
def test_the_run_ends_where_it_should(tmp_path, row, said):
    with pytest.raises(ClientFailedError, match=said):
        run_small(experiment_of(tmp_path, row, "stop"))
