"""What is not public in Flower is used through one table, and a version that lacks a name is refused in one line."""

import re
import runpy
from inspect import signature
from pathlib import Path

import pytest
from support import numbers, run_small, tiny_experiment

from clients import base
from fedsim.common.errors import UserError
from fedsim.flower import private as table
from fedsim.flower.private import PRIVATE, private, replace

ROOT = Path(__file__).parents[2]
PUBLIC = r"flwr\.(app|clientapp|serverapp)(\.(mod|strategy))?"  # packages whose names Flower documents


def test_the_installed_flower_has_every_name():
    assert [place for place in PRIVATE if private(place) is None] == []


def test_no_other_module_imports_what_is_not_public():
    files = {file for folder in ("fedsim", "strategies", "clients") for file in (ROOT / folder).rglob("*.py")}
    imports = re.compile(rf"^\s*(?:from|import) +(?!{PUBLIC}(?: |$))(flwr\S*)", re.MULTILINE)
    imported = {}
    for file in files:
        if names := [match.groups()[-1] for match in imports.finditer(file.read_text())]:
            imported[file.relative_to(ROOT).as_posix()] = names
    assert imported == {"clients/base.py": ["flwr.client"]}  # it tries, and does without
    named = re.compile(r"(?:private|replace)\(\s*\"(flwr[^\"]*)\"")
    used = {place for file in files for place in named.findall(file.read_text())}
    assert used <= PRIVATE.keys()


@pytest.mark.parametrize("place", ["flwr.gone:name", "flwr.supercore.run:gone", "flwr.supercore.run:Run.gone"])
def test_a_missing_name_is_one_line(place, monkeypatch):
    monkeypatch.setitem(PRIVATE, place, "what it is for")
    for use in (private, lambda place: replace(place, lambda _: None)):
        with pytest.raises(UserError, match=r"Flower 1\.\d+\.\d+ has no \S+ in flwr\S+ \(what it is for\)") as error:
            use(place)
        assert str(error.value).endswith(f"pip install '{table.VERSIONS}'")


def test_the_range_is_that_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r'"flwr(?:\[simulation\])?(>=[^"]*)"', text)) == {table.VERSIONS.removeprefix("flwr")}


def test_clients_work_without_flowers_class(monkeypatch, tmp_path):
    """They use nothing of Flower's NumPyClient, and there is one of the same form where Flower has none."""
    flowers = base.NumPyClient
    for name in [name for name in vars(flowers) if not name.startswith("__")]:
        monkeypatch.delattr(flowers, name)
    folder, _ = run_small(tiny_experiment(tmp_path, rounds=1))
    assert numbers(folder / "rounds.csv")["clients"].iloc[-1] == 3
    monkeypatch.delattr("flwr.client.NumPyClient")
    own = runpy.run_path(base.__file__)["NumPyClient"]
    assert own is not flowers
    for name in ("fit", "evaluate"):
        assert signature(getattr(own, name)).parameters.keys() == {"self", "parameters", "config"}
