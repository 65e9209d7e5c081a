"""A file that describes a paper's table: its rows, and the settings, targets and seeds with which they are run.

    fedsim sweep tables/fedig-a-table-5.toml          (a file in configs/tables/, or your own file)

Each block of a table has one data set and one backbone, and is a separate experiment below outputs/<table>/.
"""

import contextlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from fedsim.common.errors import UserError, nearest
from fedsim.data import benchmark, resolve_domain, unseen_domains
from fedsim.methods.variants import method_label
from fedsim.settings import DataSettings, Settings
from fedsim.settings.experiment import Experiment, config_folders, known_tables, parse_override, read_experiment
from fedsim.sweep.axes import SHARED, Axes
from fedsim.sweep.plan import Cell, Readers, plan_cells, readers

COPY = "table.toml"  # the copy of the table's file in its folder of results


class PaperRow(Settings):
    """One row of a table: our method, and its name in the paper."""

    method: str = Field(description="a row of METHODS, or a combination a+b")
    printed: str = Field("", description="the row's name in published.csv; empty: its printed numbers are not known")
    settings: list[str] = Field([], description="method.part.field=value, as with --set")

    @property
    def title(self) -> str:
        """The paper's name of the row; without one, our method and its settings."""
        return self.printed or " ".join([self.method, *self.settings])


class Absent(Settings):
    """A row of the paper's table that is not run, and why."""

    printed: str
    why: str


class Block(Settings):
    """The part of a table that has one data set and one backbone."""

    config: str = Field(description="the experiment file")
    preset: str = ""
    name: str = Field("", description="the name of its experiment; empty: the name in the experiment file")
    published: str = Field("", description="paper and table, as published.csv names them; empty when it has neither")
    targets: list[str] = ["all"]
    settings: list[str] = Field([], description="key=value, for all rows")
    rows: list[PaperRow] = Field([], description="the rows of this block; empty: the rows of the table")
    absent: list[Absent] = []


class PaperTable(Settings):
    """The content of a file in configs/tables/."""

    title: str
    deviation: str = Field(description="a text that says what the paper's ± is")
    seeds: list[int] = Field(min_length=1)
    rows: list[PaperRow] = Field([], description="the rows of all blocks that list no rows themselves")
    absent: list[Absent] = Field([], description="the rows that are not run, of blocks that list none themselves")
    blocks: list[Block] = Field(min_length=1)


@dataclass(frozen=True)
class Choice:
    """The part of a table that is run; an empty list means all methods, targets or seeds."""

    methods: Sequence[str] = ()
    targets: Sequence[str] = ()
    seeds: Sequence[int] = ()


@dataclass
class PlannedRow:
    """A row with its cells."""

    block: Block
    row: PaperRow
    cells: list[Cell]


def find_table(config: str) -> Path | None:
    """The file of a table, given as a path or by name; None when `config` names an experiment file, or no file."""
    path = Path(config)
    if path.is_file():
        return path if "blocks" in _read(path) else None
    parent, _, last = config.rpartition("/")
    for folder in config_folders() if parent in ("", "tables", "configs/tables") else ():
        found = folder / "tables" / f"{last.removesuffix('.toml')}.toml"
        if found.is_file():
            return found
    if path.parent.name == "tables":
        known = known_tables()
        raise UserError(f"no table {config!r}; {nearest(path.stem, known)}shipped ones: {', '.join(known)}")
    return None


def _read(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def read_table(path: Path) -> PaperTable:
    """The table of a file, with every block's name and rows filled in; UserError says what is wrong with it."""
    try:
        table = PaperTable.model_validate(_read(path))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{path}: {key}: {problem['msg'].removeprefix('Value error, ')}") from None
    blocks = []
    for block in table.blocks:
        own: dict[str, object] = {"name": block.name or Path(block.config).stem}
        own |= {} if block.rows else {"rows": table.rows, "absent": table.absent}
        blocks.append(block.model_copy(update=own))
    names = [block.name for block in blocks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: two blocks are called {name!r}; give one of them another name")
    for block in blocks:
        titles = [row.title for row in block.rows]
        for row in block.rows:
            if titles.count(row.title) > 1:
                raise UserError(
                    f"{path}: block {block.name!r}: two rows are called {row.title!r}; rename or remove one of them"
                )
            alien = [word for word in row.settings if not parse_override(word)[0].startswith("method.")]
            if alien:
                raise UserError(f"{path}: {row.title}: {alien[0]} applies to a whole block; put it into its settings")
    return table.model_copy(update={"blocks": blocks})


def row_experiment(block: Block, row: PaperRow, target: str = "", overrides: Sequence[str] = ()) -> Experiment:
    """The settings of one row according to the table's file; the user's overrides change those."""
    words = [*block.settings, *row.settings, *overrides, f"method.name={row.method}", f"name={block.name}"]
    words += [f"run.target={target}"] if target else []
    return read_experiment(block.config, words, block.preset)


def known_label(experiment: Experiment) -> str:
    """The label of a recipe; empty where it cannot be built, as when its method does not exist any more."""
    try:
        return method_label(experiment)
    except UserError:
        return ""


def rows_by_label(block: Block) -> dict[str, PaperRow]:
    """{label of a row's recipe: the row}; UserError for two rows with the same recipe, whose runs would be the same.

    A row whose recipe cannot be built is left out: the plan of its cells says why, and it has no runs.
    """
    found: dict[str, PaperRow] = {}
    for row in block.rows:
        label = known_label(row_experiment(block, row))
        if label in found:
            raise UserError(
                f"block {block.name!r} of the table: the rows {found[label].title!r} and {row.title!r} have the same "
                f"recipe ({label}), so that their runs are the same; change or remove one of them"
            )
        found |= {label: row} if label else {}
    return found


def plan_table(path: Path, choice: Choice, overrides: Sequence[str], output: str) -> list[PlannedRow]:
    """The rows of a table with their cells; UserError for a row or domain that the table does not have."""
    table = read_table(path)
    for text in overrides:
        key, value = parse_override(text)
        if key in (*SHARED, "preset"):
            raise UserError(f"--set {key}={value}: the table's file sets this; use --output for another folder")
    _check_methods(table, choice.methods)
    for block in table.blocks:
        rows_by_label(block)
    for name in choice.targets:
        if not any(_targets(block, [name], overrides) for block in table.blocks):
            raise UserError(f"--targets {name}: no block of the table has this domain")
    targets_of = {block.name: _targets(block, choice.targets, overrides) for block in table.blocks}
    shared, planned = readers(), []
    for block in table.blocks:
        for row in block.rows:
            if targets_of[block.name] and (not choice.methods or {row.method, row.printed} & set(choice.methods)):
                axes = Axes([row.method], targets_of[block.name], choice.seeds or table.seeds)
                words = [*block.settings, *row.settings, *overrides, f"name={block.name}", f"run.output={output}"]
                planned.append(PlannedRow(block, row, _plan_row(block, axes, words, shared)))
    return planned


def _plan_row(block: Block, axes: Axes, words: Sequence[str], shared: Readers) -> list[Cell]:
    try:
        return plan_cells(block.config, axes, words, block.preset, shared)
    except UserError as error:
        raise UserError(f"block {block.name!r} of the table: {error}") from None


def _check_methods(table: PaperTable, methods: Sequence[str]) -> None:
    known = dict.fromkeys(name for block in table.blocks for row in block.rows for name in (row.method, row.printed))
    for name in methods:
        if name not in known:
            listed = dict.fromkeys(row.method for block in table.blocks for row in block.rows)
            raise UserError(f"the table has no row {name!r}; {nearest(name, known)}there are: {', '.join(listed)}")


def _targets(block: Block, wanted: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The chosen targets of the block; all of them when none is chosen."""
    data = read_experiment(block.config, [*block.settings, *overrides], block.preset).data
    chosen = spelled(data, wanted)
    return [target for target in block_targets(block, data) if not wanted or target in chosen]


def block_targets(block: Block, data: DataSettings) -> list[str]:
    """The targets of the block, each once, as the data set spells them."""
    return unseen_domains(data) if block.targets == ["all"] else spelled(data, block.targets)


def spelled(data: DataSettings, names: Sequence[str]) -> list[str]:
    """The names of domains as the data set spells them, each once.

    A name that it does not have stays as it is, and so do all names where the data set is not on this machine: a sweep
    refuses both when it plans its cells, and a comparison does not need the images.
    """
    known = dict.fromkeys(names)
    with contextlib.suppress(UserError):
        found = benchmark(data)
        for name in names:
            with contextlib.suppress(UserError):
                known[name] = resolve_domain(found, name)
    return list(dict.fromkeys(own or name for name, own in known.items()))
