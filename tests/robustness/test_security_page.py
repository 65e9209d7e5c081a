"""SECURITY-DETAILS.md is correct: its commands run, its tests and methods exist, and its numbers are reproduced."""

import re
from pathlib import Path

import pandas as pd
import pytest

import fedsim
from fedsim.commands.cli import app
from fedsim.methods.table import METHODS
from fedsim.runs.privacy_account import total_epsilon

PAGE = Path(fedsim.__file__).parent / "deploy" / "SECURITY-DETAILS.md"
TEXT = PAGE.read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
SMALL = ["data.fraction=0.05", "train.rounds=1", "train.iterations=1", "run.threads=1"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path, monkeypatch):
    """Without changes, but on fewer images."""
    monkeypatch.chdir(tmp_path)
    program, *words = command.split()
    assert program == "fedsim"
    app([*words, *(word for setting in SMALL for word in ("--set", setting))], standalone_mode=False)
    (rounds,) = tmp_path.glob("outputs/**/rounds.csv")
    assert list(pd.read_csv(rounds)["round"]) == [0, 1]


def test_every_method_is_in_the_table_with_the_text_that_fedsim_methods_prints():
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.*) \|$", TEXT.split("## What a site tells")[1], re.MULTILINE))
    rows.pop("method")
    assert rows == {name: recipe.disclosure() for name, recipe in METHODS.items()}


def test_every_line_of_the_threat_model_names_tests_that_exist():
    table = TEXT.split("## In one table")[1].split("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in re.findall(r"^\|.*\|$", table, re.MULTILINE)[2:]]
    assert len({who for who, *_ in lines}) == 7
    tests = "".join(file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py"))
    for who, what, protected, why, held in lines:
        named = re.findall(r"`(test_\w+)`", held)
        assert named or held.startswith("none: "), (who, what, protected, why)
        assert [name for name in named if f"\ndef {name}(" not in tests] == []


@pytest.mark.parametrize(("z", "said"), [(1.0, "28.4"), (5.0, "3.8")])
def test_epsilon_of_the_page(z, said):
    assert f"{total_epsilon(z, 20, 1e-5):.1f}" == said
    assert f" {said}" in TEXT
