"""`fedsim methods`: every row once, grouped and filtered by what it changes, and only with measured costs."""

import dataclasses
import shlex

import pytest

from fedsim.commands.methods import show_method, show_methods, show_names
from fedsim.common.console import console
from fedsim.common.errors import UserError
from fedsim.methods.assembly import assemble, find_recipe
from fedsim.methods.groups import FILE, table_text
from fedsim.methods.listing import in_words, listed
from fedsim.methods.recipe import parts_of
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name
from fedsim.settings.experiment import parse_override


def names(groups):
    return [row.name for rows in groups.values() for row in rows]


def test_every_row_once_and_the_reference_first():
    groups = listed()
    assert sorted(names(groups)) == sorted(METHODS)
    assert list(groups)[:4] == ["nothing: the reference", "server", "clients", "model"]
    found = {row.name: group for group, rows in groups.items() for row in rows}
    # a report only measures what weights need, a bank only carries what a term needs
    expected = {"fedavg": "nothing: the reference", "krum": "server", "feddg-ga": "server", "fedprox": "clients",
                "scaffold": "clients", "mixstyle": "model", "csac": "server and clients"}  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert (found["deepall"], list(groups)[-1]) == ("nothing is federated", "nothing is federated")


def test_the_names_of_the_short_list_are_those_of_the_table(capsys):
    assert FILE.read_text() == table_text(), "run: python -m fedsim.methods.groups"
    show_names()
    assert "server (13): fedbn, silobn" in capsys.readouterr().out
    show_methods(group="model")
    assert "model (2)" in (out := capsys.readouterr().out)
    assert "server (" not in out
    with pytest.raises(UserError, match="did you mean 'server'"):
        show_methods(group="serve")


@pytest.mark.parametrize(("method", "words"), [
    ("fedprox+ditto", "A local step takes the task's loss, adds proximal, moves the weights by one gradient and is "
                      "followed by a step of ditto"),
    ("elcfs+jigen", "The local step is episodic_step, which takes the loss of jigsaw; it also has amplitude_bank "
                    "(banks), jigsaw_head (inserts)"),
    ("deepall", "A local step takes the task's loss and moves the weights by one gradient; one client holds all data"),
])  # fmt: skip
def test_a_combination_in_one_sentence(method, words):
    assert in_words(find_recipe(method)) == words


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_can_be_copied_at_80_columns(monkeypatch, capsys, name):
    """What follows --set, as a shell reads it, gives the same recipe; no line is longer than the terminal."""
    monkeypatch.setattr(console, "width", 80)
    show_method(name)
    lines = capsys.readouterr().out.splitlines()
    method = {"name": name}
    for words in (shlex.split(line) for line in lines if line.startswith("  --set ")):
        key, value = parse_override(words[1])
        method.setdefault(key.split(".")[1], {})[key.split(".")[2]] = value
    recipe = find_recipe(name)
    assert assemble(method, {}) == recipe
    for _, part in parts_of(recipe):
        assert method.get(part_name(part), {}).keys() == {field.name for field in dataclasses.fields(part)}
    assert max(len(line) for line in lines if "fedsim run" not in line and "://" not in line) <= 80
