"""The commands about methods: they list all, show one, check one, and write the files of a new one."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from fedsim.common.console import console, say

if TYPE_CHECKING:
    from fedsim.methods.recipe import Recipe


def show_methods(changes: str = "") -> None:
    """Print the list of methods by what they change, with cost, source and disclosure; `changes` selects slots."""
    from fedsim.methods.listing import listed, step_costs
    from fedsim.methods.recipe import Recipe

    costs, measured = step_costs()
    plain = Recipe().disclosure()
    groups = listed(changes, costs)
    widest = max((len(row.name) for rows in groups.values() for row in rows), default=0)
    for group, rows in groups.items():
        columns = (
            Column("method", width=widest),
            Column("cost", justify="right", width=5),
            "changes; source; what it discloses",
        )
        title = escape(f"{group} ({len(rows)})")
        table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, expand=True)
        for row in rows:
            outside = "" if row.origin == "fedsim" else f"{row.origin}: "
            cost = "" if row.cost is None else f"{row.cost:.2f}"
            lines = [f"{outside}{row.changes}", row.recipe.paper]
            lines += [told] if (told := row.recipe.disclosure()) != plain else []
            table.add_row(*map(escape, (row.name, cost, "\n".join(lines))))
        console.print(table)
    if not groups:
        say(f"no method changes {changes}")
    if measured:
        say(f"cost: time of one local step divided by FedAvg's, empty if it was not measured ({measured})")
    say(f"disclosure: {plain}, unless the last line of a method says something else")
    say("combine rows with +, e.g. gperxan+fedprox; details: fedsim methods NAME; filter: --changes fuse,terms")
    say("all parts by slot: fedsim methods --parts")


def show_parts() -> None:
    """Print every part that a recipe can have, by slot, in one line each."""
    from fedsim.methods.registry import one_line, parts_by_slot

    for slot, kinds in parts_by_slot().items():
        table = Table(Column("part", no_wrap=True), "what it does", title=slot, title_justify="left", box=SIMPLE_HEAD)
        for name, kind in sorted(kinds.items()):
            table.add_row(name, escape(one_line(kind)))
        console.print(table)
    say("exchange a part with --set method.SLOT=PART, add one with --set 'method.add=[\"PART\"]'")


def show_method(name: str, data: str = "", preset: str = "", overrides: Sequence[str] = ()) -> None:
    """Print one recipe with every part, every field and what it discloses.

    data: an experiment, for which the bytes per round are printed too.
    """
    from fedsim.methods.assembly import find_recipe
    from fedsim.methods.part_settings import toml_value
    from fedsim.methods.recipe import parts_of
    from fedsim.parts.part import part_name

    recipe = find_recipe(name)
    columns = (Column(title, overflow="fold") for title in ("slot", "part", "settings"))  # no name is cut
    table = Table(*columns, title=escape(f"{name}: {recipe.paper}"))
    for slot, part in parts_of(recipe):
        values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        fields = [f"method.{part_name(part)}.{key} = {toml_value(value)}" for key, value in values.items()]
        table.add_row(slot, part_name(part), escape("\n".join(fields)))
    console.print(table)
    say(f"discloses: {recipe.disclosure()}")
    if recipe.tried_with:
        say(f"it needs other settings than most; for a first try: {first_try(name, recipe)}")
    if data:
        from fedsim.commands.traffic import show_traffic

        show_traffic(name, data, preset, overrides)


def first_try(name: str, recipe: "Recipe") -> str:
    """A command that runs the method on embedded data."""
    return " ".join(["fedsim run digits --method", name, *(f"--set {each}" for each in recipe.tried_with)])


def show_findings(method: str, overrides: Sequence[str] = ()) -> bool:
    """Print one line per property of a method; returns whether all properties that can be checked hold."""
    from fedsim.commands.contract import differs_from_fedavg, findings, without_fedavg

    logging.disable(logging.WARNING)  # the check causes failures, and so warnings, on purpose
    holds = True
    try:
        for words, reason in findings(method, overrides):
            holds &= not reason
            _show_property(*(("fails", "red") if reason else ("holds", "green")), words, reason)
        if refused := without_fedavg(method, overrides):
            reason = f"FedAvg is refused with these settings: {refused}"
            _show_property("skipped", "yellow", differs_from_fedavg.__doc__, reason)
    finally:
        logging.disable(logging.NOTSET)
    return holds


def _show_property(mark: str, color: str, words: str, reason: str) -> None:
    console.print(Text.assemble((mark, color), f"  {words}{': ' + reason if reason else ''}"), soft_wrap=True)


def start_method(name: str, folder: Path) -> None:
    """Write the files of a new method and print what to do with them."""
    from fedsim.commands.new_method import write_method

    for file in write_method(name, folder):
        console.print(str(file), soft_wrap=True)
    console.print(
        f"edit them in this folder; then: pytest test_{name}.py, fedsim check-method {name}:{name}, "
        f"fedsim run digits --method {name}:{name}",
        soft_wrap=True,
    )
