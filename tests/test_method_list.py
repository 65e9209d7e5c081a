"""`fedsim methods`: every row once, grouped and filtered by what it changes, and only with measured costs."""

import dataclasses

import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.commands.methods import show_method, show_methods
from fedsim.common.console import console
from fedsim.common.errors import UserError
from fedsim.methods import listing as method_list
from fedsim.methods.listing import listed, step_costs
from fedsim.methods.part_settings import toml_value, validated
from fedsim.methods.recipe import Recipe, parts_of
from fedsim.methods.registry import parts_by_slot
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
    assert found["fedavg"] == "nothing: the reference"
    assert (found["krum"], found["feddg-ga"]) == ("server", "server")  # a report only measures what weights need
    assert (found["fedprox"], found["scaffold"]) == ("clients", "clients")  # a bank only carries what a term needs
    assert (found["mixstyle"], found["csac"]) == ("model", "server and clients")
    assert (found["deepall"], list(groups)[-1]) == ("nothing is federated", "nothing is federated")


def test_filter_by_slots_and_sides():
    fused = [name for name, recipe in METHODS.items() if recipe.fuse != Recipe().fuse]
    assert sorted(names(listed("fuse"))) == sorted(fused)
    assert set(names(listed("fuse,norm"))) == {*fused, *(n for n, r in METHODS.items() if r.norm != Recipe().norm)}
    assert {"mixstyle", "gperxan"} <= set(names(listed("model")))
    assert "fedprox" not in names(listed("model"))
    with pytest.raises(UserError, match="did you mean 'fuse'"):
        listed("fus")


def test_costs_are_those_of_the_table_and_no_others(tmp_path, monkeypatch, capsys):
    table = tmp_path / "costs.csv"
    table.write_text("method,ratio,measured\nfedsam,1.987,a small machine\n")
    monkeypatch.setattr(method_list, "step_costs", lambda: step_costs(table))
    monkeypatch.setattr(console, "width", 80)
    show_methods("client")
    lines = capsys.readouterr().out.splitlines()
    assert "1.99" in next(line for line in lines if line.split()[:1] == ["fedsam"])
    assert next(line for line in lines if line.split()[:1] == ["rsc"]).split()[1] == "client:"
    assert any("a small machine" in line for line in lines)
    assert step_costs(tmp_path / "none.csv") == ({}, "")


def test_all_parts_are_printed_by_slot(monkeypatch):
    """A user need not type a wrong name to learn the right ones."""
    monkeypatch.setattr(console, "width", 120)
    lines = [line.split() for line in CliRunner().invoke(app, ["methods", "--parts"]).output.splitlines()]
    for slot, kinds in parts_by_slot().items():
        place = lines.index([slot])
        assert [line[0] for line in lines[place:] if line and line[0] in kinds][: len(kinds)] == sorted(kinds)
    refused = CliRunner().invoke(app, ["methods", "gperxan", "--parts"])
    assert "only one of them" in str(refused.exception)


def test_shipped_costs_name_rows():
    costs, measured = step_costs()
    assert costs.keys() <= METHODS.keys()
    assert not costs or (measured and costs["fedavg"] == 1.0)
    assert all(ratio > 0 for ratio in costs.values())


@pytest.mark.parametrize("name", ["fada", "fedadg", "perada", "fedig-a"])
def test_no_setting_is_cut_at_80_columns(monkeypatch, capsys, name):
    """A name that is too long continues on the next line: without the line breaks every name is there."""
    monkeypatch.setattr(console, "width", 80)
    show_method(name)
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    shown = ["".join(row[column].strip() for row in rows) for column in (2, 3)]
    for _, part in parts_of(METHODS[name]):
        assert part_name(part) in shown[0]
        for field in dataclasses.fields(part):
            assert f"method.{part_name(part)}.{field.name}" in shown[1]


def test_settings_are_printed_as_they_are_typed(monkeypatch, capsys):
    """A line of the list is a line of TOML, and what follows the sign can be given with --set."""
    monkeypatch.setattr(console, "width", 160)
    for name in ("gperxan", "fedbn"):
        show_method(name)
    shown = capsys.readouterr().out
    for line in ("xan.stages = [1, 2, 3, 4]", "without_batch_norm.upload = true", 'xan.mix = "softmax"'):
        assert f"method.{line} " in shown
    for recipe in METHODS.values():
        for _, part in parts_of(recipe):
            for field in dataclasses.fields(part):
                text = f"method.{part_name(part)}.{field.name}={toml_value(getattr(part, field.name))}"
                assert validated(part, {field.name: parse_override(text)[1]}, "here") == part


@pytest.mark.parametrize(
    ("method", "setting", "said"),
    [
        ("fedbn", "without_batch_norm.upload=True", "valid boolean (got 'True'); write true or false"),
        ("gperxan", "xan.stages=(1,2)", "valid array (got '(1,2)'); write a list such as [1, 2, 3, 4]"),
        ("gperxan", "xan=true", "method.xan is a part; set its fields, e.g. method.xan.FIELD=true"),
        ("gperxan", "xan.stages=[1,x]", "valid array (got '[1,x]'); write a list such as [1, 2, 3, 4]"),
    ],
)
def test_a_wrong_value_is_refused_with_the_right_form(method, setting, said):
    words = ["run", "digits", "--method", method, "--set", f"method.{setting}"]
    assert str(CliRunner().invoke(app, words).exception).endswith(said)
