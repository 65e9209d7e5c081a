"""`fedsim new-method NAME`: writes a commented module with a part and a row, and a test that passes."""

import importlib.util
import keyword
from pathlib import Path

from fedsim.common.errors import UserError

MODULE = '''"""NAME: one sentence that says what the method does."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.methods.recipe import Recipe

# A method is a row of exchangeable parts (`fedsim methods --parts` lists them by slot): the row below has FedAvg's part
# in every slot that it does not name. A part derives from its slot's contract: clients/parts.py has those of the
# clients, strategies/parts.py those of the server, fedsim/models/*/base.py those of the network.


@dataclass(frozen=True)
class CLASS(Term):
    """strength * mean_i ||z_i||^2 / 2, where z_i are the features that the classifier receives.

    Replace this formula by yours, and name its paper and equation. `strength=0` gives FedAvg.

    strength: weight of the term. Fields are hyper-parameters with the paper's values; `Field` says which are allowed.
    """

    strength: Annotated[float, Field(ge=0)] = 0.01

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Called once before the first step of a round. Prepare here what the round needs, such as a frozen copy of the
        received model. `round.store` keeps tensors between rounds; `end(round)` is called after the last step."""
        if self.strength == 0:
            return None

        def term(batch: Batch) -> Tensor:
            """What is added to a batch's loss; `round.forward` has filled batch.features, logits and loss."""
            penalty = batch.features.float().square().sum(dim=1).mean() / 2
            round.tally("penalty", penalty)  # its mean becomes a column of clients.csv
            return self.strength * penalty

        return term


NAME = Recipe(
    terms=(CLASS(),),
    paper="authors, venue and year",
    discloses="model updates",  # a text that names everything that clients send to the server
)
'''

TEST = '''"""Tests of NAME: its formula, and the properties that every method must have."""

import pytest
import torch

from clients.parts import Batch
from fedsim.commands.contract import findings
from NAME import CLASS


def test_formula():
    """Two vectors of squared lengths 2 and 8: (2 + 8) / 2 / 2 = 2.5, times the strength."""
    values = []
    round = type("Round", (), {"tally": lambda self, name, value: values.append(float(value))})()
    term = CLASS(strength=0.1).begin(round)
    batch = Batch(torch.zeros(2, 1), torch.zeros(2), features=torch.tensor([[1.0, 1.0], [2.0, -2.0]]))
    assert float(term(batch)) == pytest.approx(0.25)
    assert values == [pytest.approx(2.5)]
    assert CLASS(strength=0).begin(round) is None


def test_promises_of_every_method():
    """This test does the same as `fedsim check-method NAME:NAME`."""
    assert {words: reason for words, reason in findings("NAME:NAME") if reason} == {}
'''


def write_method(name: str, folder: Path) -> list[Path]:
    """Write NAME.py and test_NAME.py into the folder; UserError for a name that is taken or not valid in Python."""
    if not name.isidentifier() or not name.islower() or keyword.iskeyword(name):
        raise UserError(
            f"{name!r} cannot be a module's name; use small letters, digits and _ and no word of Python, e.g. my_method"
        )
    files = {folder / f"{name}.py": MODULE, folder / f"test_{name}.py": TEST}
    taken = [file for file in files if file.exists()]
    if taken:
        raise UserError(f"{taken[0]} exists already; choose another name, or remove it")
    if importlib.util.find_spec(name):
        raise UserError(f"there is a module {name!r} already, which would be imported instead; choose another name")
    kind = "".join(word.capitalize() for word in name.split("_")) + "Term"
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text.replace("NAME", name).replace("CLASS", kind), encoding="utf-8")
    return list(files)
