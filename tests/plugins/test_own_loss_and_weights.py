"""What a user reads whose own loss or rule of weights is wrong: the part, the file, the line and what to do."""

import re

import pytest
from support import numbers, run_small, tiny_experiment

from fedsim.common.errors import ClientFailedError, UserError
from fedsim.common.exit_codes import explain
from fedsim.studies.search import Search, plan_search
from fedsim.testing.contract import findings

LOSS = """from dataclasses import dataclass
import torch
from clients.parts import Term
from fedsim import Recipe

@dataclass(frozen=True)
class SupCon(Term):
    def begin(self, round):
        calls = []
        def term(batch):
            calls.append(1)
            BODY
        return term

row = Recipe(terms=(SupCon(),))
"""
RULE = """from dataclasses import dataclass
from fedsim import Recipe
from strategies.parts import Weights

@dataclass(frozen=True)
class Mine(Weights):
    def weigh(self, updates, server):
        BODY

row = Recipe(weights=Mine())
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(text, name, **train): runs a row of a file with this text; returns the run's folder."""
    monkeypatch.setenv("FEDSIM_PLUGINS", str(tmp_path))

    def call(text, name, **train):
        (tmp_path / f"{name}.py").write_text(text)
        return run_small(tiny_experiment(tmp_path / "out", f"{name}:row", rounds=1, train=train))[0]

    return call


@pytest.mark.parametrize(("name", "body", "message"), [
    ("losses", "return batch.features.square().sum(dim=1)",
     "returned a tensor of shape [8] at step 1 (losses.py:10, in term); it returns one number, as by `.mean()`"),
    ("forgets", "batch.features.mean()",
     "returned None at step 1 (forgets.py:10, in term); it returns one number: is its `return` missing?"),
    ("nans", "return batch.logits.mean() * (float('nan') if len(calls) == 2 else 1)",
     "was nan at step 2 (nans.py:10, in term); look there for a division by 0"),
])  # fmt: skip
def test_a_term_that_is_no_finite_number_is_named(name, body, message, run):
    with pytest.raises(UserError, match=re.escape(f"client rot0: the term sup_con {message}")):
        run(LOSS.replace("BODY", body), name, iterations=3)


def test_an_error_in_a_term_shows_its_own_line(run):
    with pytest.raises(ClientFailedError, match=r"crashes.py\", line 12, in term(.|\n)*NameError: name 'nothing'"):
        run(LOSS.replace("BODY", "return nothing"), "crashes")


@pytest.mark.parametrize(("name", "body", "reason"), [
    ("sums", "return {each.client: 0.7 for each in updates}", "sum to 2.1"),
    ("below", "return {each.client: -1 / 3 for each in updates}", "have -0.3333 for client 'rot0'"),
    ("nanw", "return {each.client: float('nan') for each in updates}", "have nan for client 'rot0'"),
    ("lacks", "return {updates[0].client: 1.0}", "lack client 'rot15'"),
    ("listed", "return [1 / 3] * 3", "are a list and no dict"),
])  # fmt: skip
def test_weights_that_are_not_convex_are_refused(name, body, reason, run):
    message = f"the weights of mine {reason} in round 1 ({name}.py:7, in weigh); return a weight for each client"
    with pytest.raises(UserError, match=re.escape(message)):
        run(RULE.replace("BODY", body), name)


def test_weights_are_recorded_as_they_are_used(run):
    folder = run(RULE.replace("BODY", "return {each.client: 1 / 3 for each in updates}"), "thirds")
    assert list(numbers(folder / "clients.csv")["weight"].dropna()) == [pytest.approx(1 / 3)] * 3


def test_an_unexpected_error_names_the_line_of_a_users_own_file(run):
    with pytest.raises(NameError) as error:
        run(RULE.replace("BODY", "return nothing"), "typo")
    line, code = explain(error.value)
    assert line.startswith("NameError: name 'nothing' is not defined (in a file of yours, typo.py:8, in weigh; trace")
    assert code == 1


@pytest.mark.parametrize(("name", "body", "failing"), [
    ("detached", "return batch.features.square().mean().detach()",
     [("It differs from FedAvg", "sup_con adds a value without a gradient: all tensors are FedAvg's")]),
    ("infinite", "return batch.features.square().mean() * float('inf')",
     [("Losses are finite", "client rot0: the term sup_con was inf at step 1 (infinite.py:10, in term)")]),
])  # fmt: skip
def test_check_method_names_the_property_of_a_wrong_loss(name, body, failing, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_PLUGINS", str(tmp_path))
    (tmp_path / f"{name}.py").write_text(LOSS.replace("BODY", body))
    faults = [(text, reason) for text, reason in findings(f"{name}:row") if reason]
    assert len(faults) == len(failing)
    for (text, reason), (start, beginning) in zip(faults, failing, strict=True):
        assert text.startswith(start)
        assert reason.startswith(beginning)


@pytest.mark.parametrize(("name", "text", "reason"), [
    ("misspelt", LOSS.replace("def begin", "def beginn"), "SupCon defines no begin(round); did you mean 'beginn'?"),
    ("unruly", RULE.replace("def weigh", "def weight"),
     "Mine defines no weigh(updates, server); did you mean 'weight'?"),
    ("forgetful", LOSS.replace("        return term\n", ""),
     "SupCon.begin makes term() and does not use it; end begin with `return term`"),
    ("missing", LOSS.replace("import Recipe", "import Recipe, Facts"),
     "importing missing failed: ImportError: cannot import name 'Facts' from 'fedsim'"),
    ("argument", LOSS.replace("terms=", "term="),
     "keyword argument 'term' (argument.py:15, in <module>); did you mean 'terms'?"),
])  # fmt: skip
def test_a_mistake_in_the_file_is_found_before_the_run(name, text, reason, run):
    with pytest.raises(UserError, match=re.escape(reason)) as error:
        run(text.replace("BODY", "pass"), name)
    assert (
        name == "argument" or "missing.py:4, in <module>" in str(error.value) or "SupCon" in reason or "Mine" in reason
    )
    assert "start in the folder" not in str(error.value)


def test_a_search_says_which_fields_have_no_range(tmp_path, monkeypatch, capsys):
    """Trial 0 has the file's values; the term's weight has a range, and its temperature has none."""
    monkeypatch.setenv("FEDSIM_PLUGINS", str(tmp_path))
    fields = """class SupCon(Term):
    weight: Annotated[float, Tuned("log:0.1:1", "a test")] = 0.1
    temperature: float = 0.5
"""
    text = "from typing import Annotated\nfrom fedsim.settings.tuned import Tuned\n" + LOSS.replace("BODY", "pass")
    (tmp_path / "ranged.py").write_text(text.replace("class SupCon(Term):\n", fields))
    plan_search("digits", Search("ranged:row", ("rot0",), [0], (), 2), [f"run.output={tmp_path}"], "")
    line = "sup_con: temperature without a range (Tuned): not searched"
    assert line in capsys.readouterr().out.replace("\n", " ")
