"""`fedsim new-method NAME`: writes a commented module with a part for a slot and a row, and a test that passes."""

import importlib.util
import keyword
from pathlib import Path

from fedsim.common.console import console
from fedsim.common.errors import UserError, nearest

EXAMPLES = Path(__file__).with_name("examples")  # SLOT.txt: a module with a part for that slot

TEST = '''"""Tests of NAME: its formula, and the properties that every method must have."""

import dataclasses

import pytest
import torch

from clients.parts import Batch
from fedsim.testing.contract import findings
from NAME import NAME


def test_formula():
    """Two vectors of squared lengths 2 and 8: (2 + 8) / 2 / 2 = 2.5, times the strength."""
    values = []
    round = type("Round", (), {"tally": lambda self, name, value: values.append(float(value))})()
    part = dataclasses.replace(NAME.terms[0], strength=0.1)
    term = part.begin(round)
    batch = Batch(torch.zeros(2, 1), torch.zeros(2), features=torch.tensor([[1.0, 1.0], [2.0, -2.0]]))
    assert float(term(batch)) == pytest.approx(0.25)
    assert values == [pytest.approx(2.5)]
    assert dataclasses.replace(part, strength=0).begin(round) is None
PROMISES'''
PLAIN_TEST = '''"""Tests of NAME: what every method must have. Add one of its formula, on numbers by hand."""

from fedsim.testing.contract import findings
PROMISES'''
PROMISES = '''

def test_promises_of_every_method():
    """This test does the same as `fedsim check-method NAME:NAME`."""
    assert {words: reason for words, reason in findings("NAME:NAME") if reason} == {}
'''


def start_method(name: str, folder: Path, slot: str = "terms") -> None:
    """Write NAME.py, with a part for that slot, and test_NAME.py into the folder, and print what to do with them.

    UserError for a name that is taken or not valid in Python, and for a slot without an example.
    """
    examples = {file.stem: file for file in sorted(EXAMPLES.glob("*.txt"))}
    if slot not in examples:
        slots = ", ".join(examples)
        raise UserError(f"--slot: there is no example for {slot!r}; {nearest(slot, examples)}known: {slots}")
    if not name.isidentifier() or not name.islower() or keyword.iskeyword(name):
        raise UserError(
            f"{name!r} cannot be a module's name; use small letters, digits and _ and no word of Python, e.g. my_method"
        )
    module, test = examples[slot].read_text(encoding="utf-8"), TEST if slot == "terms" else PLAIN_TEST
    files = {folder / f"{name}.py": module, folder / f"test_{name}.py": test.replace("PROMISES", PROMISES)}
    taken = [file for file in files if file.exists()]
    if taken:
        raise UserError(f"{taken[0]} exists already; choose another name, or remove it")
    if importlib.util.find_spec(name):
        raise UserError(f"there is a module {name!r} already, which would be imported instead; choose another name")
    kind = "".join(word.capitalize() for word in name.split("_")) + slot.rstrip("s").title()
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text.replace("NAME", name).replace("CLASS", kind), encoding="utf-8")
        console.print(str(file), soft_wrap=True)
    console.print(
        f"edit them in this folder; then, in ten seconds each: pytest test_{name}.py, "
        f"fedsim check-method {name}:{name}, fedsim run digits --method {name}:{name} --set train.rounds=2",
        soft_wrap=True,
    )
