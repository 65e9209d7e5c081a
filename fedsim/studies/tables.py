"""A paper's table: the file that describes it, and the study that runs its rows.

    fedsim sweep tables/fedig-a-table-5.toml          (a file in configs/tables/, or your own file)

Each block of a table has one data set and one backbone, and is a separate experiment below outputs/<table>/. How our
numbers stand next to the printed ones is in `reproduction.py`.
"""

import contextlib
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from rich.markup import escape
from rich.table import Table

from fedsim.common.console import console
from fedsim.common.errors import UserError, nearest
from fedsim.data import benchmark, resolve_domain, unseen_domains
from fedsim.methods.variants import method_label
from fedsim.settings import DataSettings, Settings
from fedsim.settings.experiment import Experiment, config_folders, known_tables, parse_override, read_experiment
from fedsim.studies.axes import SHARED, Axes
from fedsim.studies.budget import Budget
from fedsim.studies.estimate import Estimate, row_estimate
from fedsim.studies.loop import carry_out
from fedsim.studies.plan import Cell, Readers, plan_cells, readers, rounds_on_disk
from fedsim.studies.study import Study

COPY = "table.toml"  # the copy of the table's file in its folder of results


class PaperRow(Settings):
    """One row of a table: our method, and its name in the paper."""

    method: str = Field(description="a row of METHODS, or a combination a+b")
    printed: str = Field("", description="the row's name in published.csv; empty: its printed numbers are not known")
    settings: list[str] = Field([], description="method.part.field=value, as with --set")
    measures: Literal["unseen", "received", "personal"] = Field(
        "unseen",
        description="the accuracy on the unseen domain; or that on the clients' own validation images, of the received "
        "model, or of this model with what a client keeps to itself (run.personalised)",
    )

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

    def has_row(self, row: PaperRow) -> bool:
        """Whether a row is among the chosen methods, by its method or by its name in the paper."""
        return not self.methods or row.method in self.methods or row.printed in self.methods


@dataclass
class PlannedRow:
    """A row with its cells."""

    block: Block
    row: PaperRow
    cells: list[Cell]


def find_table(config: str) -> Path | None:
    """Return the file of a table, given as a path or by name; None when `config` names an experiment file, or no file.

    Raises UserError for a file in a folder `tables` that is not there.
    """
    path = Path(config)
    if path.is_file():
        return path if "blocks" in _read(path) else None
    parent, _, last = config.rpartition("/")
    for folder in config_folders() if parent in ("", "tables", "configs/tables") else ():
        file = folder / "tables" / f"{last.removesuffix('.toml')}.toml"
        if file.is_file():
            return file
    if path.parent.name == "tables":
        shipped = known_tables()
        raise UserError(f"no table {config!r}; {nearest(path.stem, shipped)}shipped ones: {', '.join(shipped)}")
    return None


def _read(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def read_table(path: Path) -> PaperTable:
    """Return the table of a file, with every block's name and rows filled in; UserError says what is wrong with it."""
    try:
        table = PaperTable.model_validate(_read(path))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{path}: {key}: {problem['msg'].removeprefix('Value error, ')}") from None
    blocks = [_filled_in(block, table) for block in table.blocks]
    if name := _twice([block.name for block in blocks]):
        raise UserError(f"{path}: two blocks are called {name!r}; give one of them another name")
    for block in blocks:
        _check_rows(path, block)
    return table.model_copy(update={"blocks": blocks})


def _filled_in(block: Block, table: PaperTable) -> Block:
    """The block with a name, and with the table's rows where it lists none itself."""
    update: dict[str, object] = {"name": block.name or Path(block.config).stem}
    if not block.rows:
        update |= {"rows": table.rows, "absent": table.absent}
    return block.model_copy(update=update)


def _check_rows(path: Path, block: Block) -> None:
    """UserError for two rows with one title, or for a row with a setting of the whole block."""
    title = _twice([row.title for row in block.rows])
    for row in block.rows:
        if row.title == title:
            where = f"{path}: block {block.name!r}"
            raise UserError(f"{where}: two rows are called {title!r}; rename or remove one of them")
        for setting in row.settings:
            if not parse_override(setting)[0].startswith("method."):
                raise UserError(f"{path}: {row.title}: {setting} applies to a whole block; put it into its settings")


def _twice(names: Sequence[str]) -> str | None:
    """The first name that is there more than once."""
    return next((name for name in names if names.count(name) > 1), None)


def row_experiment(
    block: Block,
    row: PaperRow,
    target: str = "",
    overrides: Sequence[str] = (),
) -> Experiment:
    """Return the settings of one row according to the table's file; the user's overrides change those."""
    settings = [*block.settings, *row.settings, *overrides, f"method.name={row.method}", f"name={block.name}"]
    if target:
        settings.append(f"run.target={target}")
    return read_experiment(block.config, settings, block.preset)


def known_label(experiment: Experiment) -> str:
    """Return the label of a recipe; empty where it cannot be built, as when its method does not exist any more."""
    try:
        return method_label(experiment)
    except UserError:
        return ""


def labelled_rows(block: Block) -> list[tuple[str, PaperRow]]:
    """(label of a row's recipe, the row) of each row of a block; rows that measure different things may share a recipe.

    A row whose recipe cannot be built is left out: the plan of its cells says why, and it has no runs. Raises UserError
    for two rows with the same recipe that measure the same, whose numbers would be the same.
    """
    rows: dict[tuple[str, str], PaperRow] = {}
    for row in block.rows:
        label = known_label(row_experiment(block, row))
        key = label, row.measures
        if key in rows:
            raise UserError(
                f"block {block.name!r} of the table: the rows {rows[key].title!r} and {row.title!r} have the same "
                f"recipe ({label}), so that their runs are the same; change or remove one of them"
            )
        if label:
            rows[key] = row
    return [(label, row) for (label, _), row in rows.items()]


def plan_table(
    path: Path,
    choice: Choice,
    overrides: Sequence[str],
    output: str,
) -> list[PlannedRow]:
    """Return the chosen rows of a table with their cells.

    Raises UserError for a row or domain that the table does not have, and where nothing of the table is chosen.
    """
    table = read_table(path)
    _check_choice(table, choice, overrides)
    shared = readers()
    planned = []
    for block in table.blocks:
        targets = _targets(block, choice.targets, overrides)
        rows = [row for row in block.rows if choice.has_row(row)] if targets else []
        for row in rows:
            axes = Axes([row.method], targets, choice.seeds or table.seeds)
            settings = [*block.settings, *row.settings, *overrides]
            settings += [f"name={block.name}", f"run.output={output}"]
            cells = _plan_row(block, axes, settings, shared)
            planned.append(PlannedRow(block, row, cells))
    if not planned:
        raise UserError("no block of the table has such a row and such a target; choose others by --methods, --targets")
    return planned


def _check_choice(table: PaperTable, choice: Choice, overrides: Sequence[str]) -> None:
    """UserError for settings that the table's file sets, and for a row or domain that the table does not have."""
    for override in overrides:
        key, value = parse_override(override)
        if key in (*SHARED, "preset"):
            raise UserError(f"--set {key}={value}: the table's file sets this; use --output for another folder")
    _check_methods(table, choice.methods)
    for block in table.blocks:
        labelled_rows(block)
    for name in choice.targets:
        if not any(_targets(block, [name], overrides) for block in table.blocks):
            raise UserError(f"--targets {name}: no block of the table has this domain")


def _plan_row(block: Block, axes: Axes, settings: Sequence[str], shared: Readers) -> list[Cell]:
    """The cells of one row; UserError with the name of the block."""
    try:
        return plan_cells(block.config, axes, settings, block.preset, shared)
    except UserError as error:
        raise UserError(f"block {block.name!r} of the table: {error}") from None


def _check_methods(table: PaperTable, methods: Sequence[str]) -> None:
    """UserError for a method that is neither a row's method nor its name in the paper."""
    rows = [row for block in table.blocks for row in block.rows]
    names: dict[str, None] = {}
    for row in rows:
        names |= {row.method: None, row.printed: None}
    for name in methods:
        if name not in names:
            listed = ", ".join(dict.fromkeys(row.method for row in rows))
            raise UserError(f"the table has no row {name!r}; {nearest(name, names)}there are: {listed}")


def _targets(block: Block, chosen: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The chosen targets of the block; all of them when none is chosen."""
    data = read_experiment(block.config, [*block.settings, *overrides], block.preset).data
    targets = block_targets(block, data)
    if not chosen:
        return targets
    names = spelled(data, chosen)
    return [target for target in targets if target in names]


def block_targets(block: Block, data: DataSettings) -> list[str]:
    """Return the targets of the block, each once, as the data set spells them."""
    return unseen_domains(data) if block.targets == ["all"] else spelled(data, block.targets)


def spelled(data: DataSettings, names: Sequence[str]) -> list[str]:
    """Return the names of domains as the data set spells them, each once.

    A name that it does not have stays as it is, and so do all names where the data set is not on this machine: a sweep
    refuses both when it plans its cells, and a comparison does not need the images.
    """
    spellings = {name: name for name in names}
    with contextlib.suppress(UserError):
        dataset = benchmark(data)
        for name in names:
            with contextlib.suppress(UserError):
                spellings[name] = resolve_domain(dataset, name)
    return list(dict.fromkeys(spellings.values()))


class TableStudy(Study):
    """The cells of the chosen rows of a table, all of them in one step.

    The table's file is copied into the folder of the results, so that `fedsim compare` knows which printed numbers to
    show.
    """

    def __init__(
        self,
        file: Path,
        folder: Path,
        rows: Sequence[PlannedRow],
    ) -> None:
        self._file, self._folder, self._rows = file, folder, rows
        cells = [cell for row in rows for cell in row.cells]
        self._cells = list({cell.folder: cell for cell in cells}.values())  # two rows may share one

    def ask(self) -> list[Cell]:
        cells, self._cells = self._cells, []
        return cells

    def begin(self, dry_run: bool) -> None:
        if not dry_run:
            self._folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(shutil.SameFileError):
                shutil.copyfile(self._file, self._folder / COPY)
        console.print(escape(read_table(self._file).title), highlight=False, soft_wrap=True)

    def table(self, cells: Sequence[Cell], width: int) -> Table:
        """Return the rows with their cells and the hours of one; where nothing is measured, a row says so instead."""
        table = Table("block", "row", "method", "targets", "seeds", "finished", "hours a cell")
        estimates = []
        for row in self._rows:
            for cell in row.cells:
                cell.round = rounds_on_disk(cell)
            estimate = row_estimate(row.cells)
            table.add_row(*map(escape, row_texts(row, estimate)))
            estimates.append(estimate)
        table.caption = caption(estimates, width or 1)
        return table


def row_texts(row: PlannedRow, estimate: Estimate) -> list[str]:
    """Return the texts of one row in the table of a dry run."""
    targets = {cell.experiment.run.target for cell in row.cells}
    seeds = {cell.experiment.run.seed for cell in row.cells}
    finished = [cell for cell in row.cells if cell.state == "finished"]
    return [
        row.block.name,
        row.row.title,
        " ".join([row.row.method, *row.row.settings]),
        str(len(targets)),
        str(len(seeds)),
        f"{len(finished)}/{len(row.cells)}",
        estimate.source if estimate.seconds is None else _hours(estimate.seconds / max(estimate.cells, 1)),
    ]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f}"


def caption(estimates: Sequence[Estimate], width: int) -> str:
    """Return the total time of a table as text, with the measurements from which it follows."""
    seconds = 0.0
    unknown = cells = 0
    sources = []
    for estimate in estimates:
        if estimate.seconds is None:
            unknown += 1
        elif estimate.seconds:
            seconds += estimate.seconds
            cells += estimate.cells
            sources.append(estimate.source)
    missing = "1 row is not measured" if unknown == 1 else f"{unknown} rows are not measured"
    if not sources:
        return f"time not known: {missing}; python benchmarks/steps.py --table NAME --record measures local steps"
    basis = "; ".join(dict.fromkeys(sources))
    text = (
        f"{cells} cells to run, {_hours(seconds / cells)} hours each: {_hours(seconds)} hours one cell at a time, "
        f"{_hours(seconds / width)} with {width}, at the speed of what was measured ({basis})"
    )
    return f"{text}, and {missing}" if unknown else text


def run_table(
    file: Path,
    choice: Choice,
    budget: Budget,
    *,
    overrides: Sequence[str],
    output: str,
    dry_run: bool,
) -> list[Cell]:
    """Run all cells of a table that are not finished, below OUTPUT/<table>; returns the failed ones.

    Raises UserError when no data set of the table is there, before any cell starts.
    """
    folder = Path(output or "outputs") / file.stem
    rows = plan_table(file, choice, overrides, str(folder))
    return carry_out(TableStudy(file, folder, rows), budget, dry_run)
