"""SECURITY.md says what is so: its commands run, its table is the methods', its numbers come out."""

import math
import re
from pathlib import Path

import pandas as pd
import pytest

import fedsim
from fedsim.cli import app
from fedsim.methods import METHODS

PAGE = Path(fedsim.__file__).parent / "deploy" / "SECURITY.md"
TEXT = PAGE.read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
SMALL = ["data.fraction=0.05", "train.rounds=1", "run.threads=1"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path, monkeypatch):
    """Word for word, on fewer images."""
    monkeypatch.chdir(tmp_path)
    program, *words = command.split()
    assert program == "fedsim"
    app([*words, *(word for setting in SMALL for word in ("--set", setting))], standalone_mode=False)
    (rounds,) = tmp_path.glob("outputs/**/rounds.csv")
    assert list(pd.read_csv(rounds)["round"]) == [0, 1]


def test_every_method_is_in_the_table():
    """With the very words that `fedsim methods NAME` prints."""
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.*) \|$", TEXT.split("## What a site tells")[1], re.MULTILINE))
    rows.pop("method")
    assert rows == {name: recipe.disclosure() for name, recipe in METHODS.items()}


@pytest.mark.parametrize(("z", "said"), [(1.0, "31.5"), (5.0, "4.7")])
def test_epsilon_of_the_page(z, said):
    """The closed form is the best Renyi order's bound of T Gaussian releases (Mironov 2017), and the page's numbers."""
    rounds, log = 20, math.log(1e5)
    closed = rounds / (2 * z**2) + math.sqrt(2 * rounds * log) / z
    orders = (1 + step / 1000 for step in range(1, 100_000))
    best = min(rounds * order / (2 * z**2) + log / (order - 1) for order in orders)
    assert abs(best - closed) < 1e-3
    assert f"{closed:.1f}" == said
    assert f" {said}" in TEXT
