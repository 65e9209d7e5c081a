"""The commands about methods: they list all, show one, check one, and write the files of a new one."""

import dataclasses
import importlib.util
import inspect
import keyword
import logging
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from fedsim.common.console import console, say
from fedsim.common.errors import UserError, nearest

if TYPE_CHECKING:
    from fedsim.methods.listing import MethodRow
    from fedsim.methods.recipe import Recipe
    from fedsim.parts.part import Part
    from fedsim.settings.effect import Facts


def show_names() -> None:
    """Print the names of all methods by what they change."""
    from fedsim.methods.groups import groups
    from fedsim.settings.plugins import entry_points

    by_group = groups()
    known = {name for names in by_group.values() for name in names}
    for group, names in {**by_group, "installed packages": [*(entry_points("methods").keys() - known)]}.items():
        if names:
            _say_wrapped(f"  {group} ({len(names)}): {', '.join(names)}")
    say("one with its parts, formulas and settings: fedsim methods NAME; a combination: fedsim methods A+B")
    say("cost, source and disclosure: --all, --group server or --changes fuse,terms; all parts: --parts")


def show_methods(changes: str = "", group: str = "") -> None:
    """Print methods by what they change, with cost, source and disclosure; `changes` selects slots, `group` a group."""
    from fedsim.methods.listing import listed, step_costs
    from fedsim.methods.recipe import Recipe

    plain = Recipe().disclosure()
    groups = _only(group, listed(changes))
    widest = max((len(row.name) for rows in groups.values() for row in rows), default=0)
    for group, rows in groups.items():
        columns = (
            Column("method", width=widest),
            Column("cost", justify="right", width=5),
            "idea; changes; source; what it discloses",
        )
        title = escape(f"{group} ({len(rows)})")
        table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, expand=True)
        for row in rows:
            table.add_row(*map(escape, _cells(row, plain)))
        console.print(table)
    if not groups:
        say(f"no method changes {changes}")
    say(f"cost: time of one local step divided by FedAvg's, empty if it was not measured ({step_costs()[1]})")
    say(f"disclosure: {plain}, unless the last line of a method says something else")
    say("combine rows with +, e.g. gperxan+fedprox; details: fedsim methods NAME; filter: --changes fuse,terms")
    say("all parts by slot: fedsim methods --parts")


def _only(group: str, groups: "dict[str, list[MethodRow]]") -> "dict[str, list[MethodRow]]":
    """The group of that name, or all without a name; UserError with the nearest name when there is none."""
    if not group:
        return groups
    named = next((name for name in groups if name.partition(":")[0] == group), None)
    if named is None:
        raise UserError(f"--group: no group is called {group!r}; {nearest(group, groups)}known: {', '.join(groups)}")
    return {named: groups[named]}


def _cells(row: "MethodRow", plain: str) -> tuple[str, str, str]:
    """Name, cost, and a method's idea, what it changes and discloses, where that is not the plain disclosure."""
    from fedsim.methods.groups import ideas_of, printed_name

    outside = "" if row.origin == "fedsim" else f"{row.origin}: "
    named = [f"{printed_name(row.name)}: {idea}" for idea in ideas_of(row.name)]
    lines = [*named, f"{outside}{row.changes}", row.recipe.paper]
    disclosure = row.recipe.disclosure()
    if disclosure != plain:
        lines.append(disclosure)
    return row.name, "" if row.cost is None else f"{row.cost:.2f}", "\n".join(lines)


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
    """Print one recipe: the formula of every part, every setting as `--set` takes it, and what it discloses.

    data: an experiment, for which the bytes per round are printed too.
    """
    from fedsim.methods.assembly import find_recipe
    from fedsim.methods.part_settings import method_facts
    from fedsim.methods.recipe import Recipe
    from fedsim.parts.part import part_name
    from fedsim.settings import TrainSettings
    from fedsim.settings.effect import marks
    from fedsim.settings.tuned import Tuned

    recipe = find_recipe(name)
    _show_idea(name, recipe)
    plain = [(slot, repr(part)) for slot, part in Recipe().pairs]
    standard = []
    for slot, part in recipe.pairs:
        if (slot, repr(part)) in plain and not dataclasses.fields(part):
            if slot != "weights" or not _unweighted(recipe):
                standard.append(f"{slot} {part_name(part)}")
        else:
            _show_part(slot, part, method_facts(recipe))
    say("")
    _show_unused(recipe)
    _say_wrapped(f"as in FedAvg: {', '.join(standard) or 'nothing'}")
    _say_wrapped(f"discloses: {recipe.disclosure()}")
    spaces = [f"train.{key} from {one.words()}" for key, each in marks(TrainSettings, Tuned).items() for one in each]
    _say_wrapped(f"a search also draws {'; '.join(spaces)}")
    if recipe.tried_with:
        say(f"it needs other settings than most; for a first try: {first_try(name, recipe)}")
    if data:
        _show_traffic(name, data, preset, overrides)


def _show_idea(name: str, recipe: "Recipe") -> None:
    """Print a method's idea, its papers with their links, and the sentence that its parts give."""
    from fedsim.methods.groups import ideas_of, papers_of, titled
    from fedsim.methods.listing import in_words

    console.print(Text(f"{titled(name)}: {recipe.paper}", "bold"))
    for idea in ideas_of(name):
        _say_wrapped(idea)
    for paper in papers_of(recipe.paper):
        _say_wrapped(f"{paper.title}, {paper.link}")
    _say_wrapped(f"{in_words(recipe)}.")


def _unweighted(recipe: "Recipe") -> list[str]:
    """Return the names of the parts with which no client counts with its weight."""
    from fedsim.parts.facts import Fact
    from fedsim.parts.part import part_name

    return [part_name(part) for _, part in recipe.pairs if Fact.CLIENT_WEIGHTS in part.breaks]


def _show_unused(recipe: "Recipe") -> None:
    """Print what a recipe has and does not use: parts without what they need, and weights of clients."""
    for _, part in recipe.pairs:
        if part.remark:
            _say_wrapped(f"by default: {part.remark}")
    if names := _unweighted(recipe):
        _say_wrapped(f"weights of clients: not used by {', '.join(names)}")


def _show_traffic(name: str, config: str, preset: str, overrides: Sequence[str]) -> None:
    """Print the bytes that one client receives and sends in a round of an experiment, with a method and with FedAvg."""
    from fedsim.runs.plan import resolve
    from fedsim.runs.traffic import traffic
    from fedsim.settings.experiment import from_table, read_experiment

    fixed = [f"method.name={name}", "model.weights=none", "run.device=cpu"]  # sizes do not depend on initial weights
    experiment = read_experiment(config, [*overrides, *fixed], preset)
    table = Table("record", "when", Column("down", justify="right"), Column("up", justify="right"),
                  title=escape(f"bytes of one client on {experiment.name}, {experiment.model.backbone}"))  # fmt: skip
    rows = traffic(resolve(experiment))
    for row in rows:
        amounts = ["depends on the data" if amount is None else f"{amount:,}" for amount in (row.down, row.up)]
        table.add_row(escape(row.record), row.when, *amounts)
    refused = ""
    try:
        fedavg = traffic(resolve(from_table({**experiment.model_dump(), "method": {"name": "fedavg"}})))
        plain = [f"{sum(getattr(row, way) or 0 for row in fedavg):,}" for way in ("down", "up")]  # all are known
    except UserError as error:  # FedAvg cannot run with these settings, as with texts alone, of which it learns none
        plain, refused = ["-", "-"], str(error)
    table.add_row("FedAvg's model", "round", *plain, style="dim")
    console.print(table)
    if refused:
        say(f"FedAvg has no bytes to compare with, because it is refused with these settings: {refused}")
    say("sums of a round are bytes_down and bytes_up in clients.csv, single banks bytes_down_NAME and bytes_up_NAME")


def _show_part(slot: str, part: "Part", facts: "Facts") -> None:
    """The part's docstring and those of its layers; then its settings, each on a line that can be copied."""
    from fedsim.methods.docstrings import blocks, field_of, layers_of
    from fedsim.methods.part_settings import explained, typed
    from fedsim.parts.part import part_name

    kind, name = type(part), part_name(part)
    say("")
    console.print(Text(f"{slot}: {name}", "bold").append(f"  {kind.__module__.replace('.', '/')}.py", "dim"))
    settings = explained(part, facts)
    for each in (kind, *layers_of(kind)):
        for form, body in blocks(inspect.getdoc(each) or ""):
            if form == "lines" or not set(field_of(body)[0]) & settings.keys():
                for line in body.split("\n"):
                    _say_wrapped(line, "  ")
    for field, meaning in settings.items():
        value = typed(f"method.{name}.{field}", getattr(part, field))
        console.print(Text(f"  --set {value}", "cyan"), soft_wrap=True)
        _say_wrapped(meaning, " " * 6)


def _say_wrapped(text: str, margin: str = "") -> None:
    """Print a text with line breaks between words alone, so that a name can be copied as a whole."""
    for line in textwrap.wrap(
        text,
        console.width,
        initial_indent=margin,
        subsequent_indent=margin + " " * (len(text) - len(text.lstrip())),
        break_long_words=False,
        break_on_hyphens=False,
    ):
        say(line)


def first_try(name: str, recipe: "Recipe") -> str:
    """A command that runs the method on embedded data."""
    return " ".join(["fedsim run digits --method", name, *(f"--set {each}" for each in recipe.tried_with)])


def show_findings(method: str, overrides: Sequence[str] = ()) -> bool:
    """Print one line per property of a method; returns whether all properties that can be checked hold."""
    from fedsim.testing.contract import differs_from_fedavg, findings, without_fedavg

    logging.disable(logging.WARNING)  # the check causes failures, and so warnings, on purpose
    holds = True
    try:
        for text, reason in findings(method, overrides):
            holds &= not reason
            _show_property(*(("fails", "red") if reason else ("holds", "green")), text, reason)
        if refused := without_fedavg(method, overrides):
            reason = f"FedAvg is refused with these settings: {refused}"
            _show_property("skipped", "yellow", str(differs_from_fedavg.__doc__), reason)
    finally:
        logging.disable(logging.NOTSET)
    return holds


def _show_property(mark: str, color: str, words: str, reason: str) -> None:
    console.print(Text.assemble((mark, color), f"  {words}{': ' + reason if reason else ''}"), soft_wrap=True)


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
