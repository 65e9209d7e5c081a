"""Our runs of a paper's table next to the printed numbers: differences, and whether they are within the paper's ±.

The table is shown on the terminal, and written as CSV, Markdown and LaTeX.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from fedsim.analysis.notes import (
    damaged_notes,
    missing_notes,
    part_notes,
    round_notes,
    split_notes,
    test_size_notes,
    unfinished_notes,
)
from fedsim.analysis.provenance import environments, provenance_notes, refuse_unlike
from fedsim.analysis.published import (
    DATASETS,
    domain_key,
    lacks_domains,
    printed_numbers,
    protocol_differences,
    shortened,
)
from fedsim.analysis.statistics import grid_of, mean_and_std, per_seed_average
from fedsim.common.errors import UserError, nearest
from fedsim.common.tables import LABEL, MISSING, Cell, Column, Row, Table, csv_text, percent
from fedsim.data.benchmarks import AVERAGE
from fedsim.methods.registry import refuse_outside
from fedsim.records.differences import differing_settings, refuse_twice
from fedsim.records.reading import Runs, of_experiment, part_of
from fedsim.records.selection import RULES, rule_title
from fedsim.settings.experiment import Experiment
from fedsim.studies.plan import once
from fedsim.studies.tables import (
    COPY,
    Block,
    PaperRow,
    PaperTable,
    block_targets,
    known_label,
    labelled_rows,
    read_table,
    row_experiment,
)

INSIDE = {"received": "validation_accuracy", "personal": "personal_accuracy"}  # {what a row measures: of clients.csv}


@dataclass(frozen=True)
class Numbers:
    """Mean and spread of one cell as fractions; NaN for a missing number."""

    mean: float = math.nan
    std: float = math.nan
    seeds: int = 0


@dataclass
class Line:
    """One row of a table: our numbers and the paper's by target (including `average`).

    unlike: the settings in which our runs differ from the table's. When there are any, no difference is given, because
    it would compare two protocols.
    uneven: the average rests on fewer seeds than a column, because a seed lacks a target. It then has no verdict.
    """

    row: PaperRow
    ours: dict[str, Numbers] = field(default_factory=dict)
    theirs: dict[str, Numbers] = field(default_factory=dict)
    unlike: list[str] = field(default_factory=list)
    uneven: bool = False

    def difference(self, target: str) -> float:
        """Our number minus the paper's, as a fraction; NaN when one is missing or the protocols differ."""
        if self.unlike:
            return math.nan
        return self.ours.get(target, Numbers()).mean - self.theirs.get(target, Numbers()).mean

    def verdict(self, target: str) -> str:
        """`inside` when the difference is at most the paper's ±, else `outside`; empty when the paper prints no ±."""
        gap, allowed = abs(self.difference(target)), self.theirs.get(target, Numbers()).std
        if math.isnan(gap) or math.isnan(allowed) or (target == AVERAGE and self.uneven):
            return ""
        return "inside" if gap <= allowed + 1e-9 else "outside"


@dataclass
class Reproduction:
    """One block of a table, with a line for each row that has runs."""

    block: Block
    title: str
    targets: list[str]
    lines: list[Line]
    notes: list[str]
    select: str


def reproductions(
    folder: Path,
    runs: Runs,
    select: str = "best_validation",
    trust: bool = False,
) -> list[Reproduction]:
    """Return every block of the table in FOLDER/table.toml that has runs, under one selection rule.

    Raises UserError for an unknown rule, for runs that do not belong together, and for a table that names modules
    outside fedsim, without trust.
    """
    if select not in RULES:
        raise UserError(f"unknown selection rule {select!r}; {nearest(select, RULES)}known: {', '.join(RULES)}")
    table = read_table(folder / COPY)
    for block in table.blocks:
        for row in block.rows:
            refuse_outside(row_experiment(block, row), folder / COPY, trust)
    results = []
    for block in table.blocks:
        of_block = of_experiment(runs, block.name)
        if len(of_block.summary):
            results.append(reproduce(table, block, of_block, select))
    return results


def reproduce(
    table: PaperTable,
    block: Block,
    runs: Runs,
    select: str,
) -> Reproduction:
    """Return our numbers of one block next to the paper's; UserError for runs that do not belong together."""
    base = row_experiment(block, block.rows[0])
    targets = block_targets(block, base.data)
    printed = printed_numbers(block.published, base)
    if lacks_domains(DATASETS.get(base.data.dataset, ""), targets):  # a paper's average is over all of its domains
        printed = printed[printed["target"] != AVERAGE]
    cells = cells_of(block, runs, targets, select)
    for row in block.rows:
        refuse_mixed(block, row, runs, cells)
    label_of_run = dict(zip(cells["run"], cells["label"]))
    recorded = {run: environment for run, environment in environments(runs).items() if run in label_of_run}
    refuse_unlike(runs, recorded, label_of_run)
    refuse_twice(cells)
    lines = []
    for row in block.rows:
        line = line_of(block, row, runs, cells, printed, targets)
        if line.ours:
            lines.append(line)
    experiments = [runs.experiments[run] for run in cells["run"]]
    rule = rule_title(select, experiments)
    notes = [
        *part_notes(runs.only),
        *notes_on_numbers(table, block, lines, select),
        *notes_on_runs(block, runs, cells, targets, select),
        *provenance_notes(recorded),
    ]
    title = f"{table.title} - {block.name}: {rule}"
    return Reproduction(block, title, targets, lines, notes, select)


def cells_of(
    block: Block,
    runs: Runs,
    targets: list[str],
    select: str,
) -> pd.DataFrame:
    """Return a row for each run of the block's rows and targets.

    Its columns are label (the row's title), run, target, seed, accuracy, split_seed, target_images and round (the
    selected one). A run is there once for each row that it belongs to.
    """
    labels = runs.summary["run"].map(labels_of(runs))
    is_asked = runs.summary["target"].isin(targets)
    parts = []
    for label, row in labelled_rows(block):
        of_row = runs.summary[is_asked & (labels == label)]
        if len(of_row):
            parts.append(cells_of_row(row, of_row, select))
    if not parts:
        return cells_of_row(block.rows[0], runs.summary[:0], select)
    return pd.concat(parts, ignore_index=True)


def cells_of_row(row: PaperRow, summary: pd.DataFrame, select: str) -> pd.DataFrame:
    """Return the cells of one row, which has the runs of this summary."""
    empty = pd.Series(dtype=float)
    columns = {
        "label": pd.Series(row.title, index=summary.index, dtype=object),
        "run": summary["run"],
        "target": summary["target"],
        "seed": summary["seed"],
        "split_seed": summary.get("split_seed", empty),
        "target_images": summary.get("target_images", empty),
        "accuracy": summary.get(f"{select}_target_accuracy", empty).astype(float),
        "round": summary.get(f"{select}_round", empty),
    }
    return pd.DataFrame(columns)


def inside_cells(row: PaperRow, runs: Runs, cells: pd.DataFrame) -> pd.DataFrame:
    """Return the accuracy on the clients' own validation images, in place of that on the unseen domains.

    There is one cell for each domain and seed: the mean over the clients of the domain, in all runs of the seed in
    which they train. Raises UserError for runs without the column.
    """
    column = INSIDE[row.measures]
    if column not in runs.clients:
        raise UserError(
            f"the row {row.title!r} of the table needs {column} in clients.csv; repeat the runs with "
            "--set run.personalised=true"
        )
    selected = runs.clients.merge(cells[["run", "round"]], on=["run", "round"])
    of_domains = selected.groupby(["seed", "domain"], as_index=False)
    means = of_domains[column].mean()
    names = {"domain": "target", column: "accuracy"}
    return means.rename(columns=names).assign(label=row.title)


def labels_of(runs: Runs) -> dict[str, str]:
    """Return {run: the label of its recipe}, which is empty where the recipe cannot be built."""

    def recipe(experiment: Experiment) -> str:
        return json.dumps([experiment.method, experiment.parts], sort_keys=True)

    label = once(known_label, recipe)
    return {run: label(runs.experiments[run]) for run in runs.summary["run"]}


def refuse_mixed(
    block: Block,
    row: PaperRow,
    runs: Runs,
    cells: pd.DataFrame,
) -> None:
    """Raise UserError when the runs of a row differ in settings: an average over them would be of several experiments.

    A part in [parts] that the row does not have changes nothing, so that the runs may differ in it.
    """
    of_row = cells.loc[cells["label"] == row.title, "run"]
    idle = tuple(f"parts.{part}." for method, part in runs.unused_parts if method == row.method)
    differing = []
    for key, values in differing_settings(runs.comparable[run] for run in of_row).items():
        if not key.startswith(idle):
            differing.append(f"{key} ({' | '.join(values)})")
    if differing:
        raise UserError(
            f"block {block.name!r} of the table: the runs of the row {row.title!r} differ in more than target and "
            f"seed: {', '.join(differing)}; move the runs of one setting to another folder, or choose runs that are "
            "alike with --seeds or --targets"
        )


def line_of(
    block: Block,
    row: PaperRow,
    runs: Runs,
    cells: pd.DataFrame,
    printed: pd.DataFrame,
    targets: list[str],
) -> Line:
    """Return one row of the table: our numbers, the paper's, and the settings in which our runs are not the table's."""
    of_row = cells[cells["label"] == row.title]
    measured = of_row
    if row.measures in INSIDE and len(of_row):
        measured = inside_cells(row, runs, of_row)
    ours = our_numbers(measured, row.title, targets)
    is_uneven = len({numbers.seeds for numbers in ours.values()}) > 1
    theirs = their_numbers(printed, row.printed, targets)
    line = Line(row, ours, theirs, uneven=is_uneven)
    references = {target: row_experiment(block, row, target) for target in of_row["target"].unique()}
    labels = runs.labels()
    for run, target in zip(of_row["run"], of_row["target"]):
        method = labels[run].partition("@")[0]
        if method != row.method:
            line.unlike.append(f"it runs as {method}")  # such as ccst(pixel)
        for text in protocol_differences(runs.experiments[run], references[target]):
            if not text.startswith("method."):  # the recipes are equal, even if they are written differently
                line.unlike.append(text)
    return line


def our_numbers(cells: pd.DataFrame, title: str, targets: list[str]) -> dict[str, Numbers]:
    """Return {target: mean and spread of our runs of a row}, with their average; without the targets that lack runs."""
    grid = grid_of(cells, title).reindex(columns=targets)
    columns = {target: grid[target] for target in targets}
    columns[AVERAGE] = per_seed_average(grid, targets)
    numbers = {}
    for target, values in columns.items():
        statistics = mean_and_std(values)
        if statistics["seeds"]:
            numbers[target] = Numbers(**statistics)
    return numbers


def their_numbers(printed: pd.DataFrame, name: str, targets: list[str]) -> dict[str, Numbers]:
    """Return {target: the paper's mean and ±} of the row that the paper calls so."""
    target_of = {domain_key(target): target for target in targets}
    target_of[AVERAGE] = AVERAGE
    numbers = {}
    for _, row in printed[printed["method"] == name].iterrows():
        target = target_of.get(row["target"])
        if target:
            numbers[target] = Numbers(row["mean"], row["std"])
    return numbers


def notes_on_numbers(
    table: PaperTable,
    block: Block,
    lines: Sequence[Line],
    select: str,
) -> list[str]:
    """Return what a reader of the numbers must know: what ± is on both sides, other settings, and rows without runs."""
    seeds = max((numbers.seeds for line in lines for numbers in line.ours.values()), default=0)
    paper = block.published or "no printed number is known here"
    notes = [
        f"Accuracy on the unseen domain in %; ours: mean ± sample standard deviation over up to {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'} ({len(table.seeds)} in the table's file); theirs: {paper}.",
        f"The paper's ±: {table.deviation}. inside: the difference is at most that ±; without a ± there is no verdict.",
    ]
    inside = [line.row.title for line in lines if line.row.measures in INSIDE]
    if inside:
        notes.append(
            f"{', '.join(inside)}: the accuracy on the validation images of clients that train, by domain, over the "
            "runs in which the domain is not the unseen one."
        )
    if select == "oracle":
        notes.append("ORACLE: the round was chosen on the unseen domain's labels. An upper bound, not a result.")
    for line in lines:
        if line.unlike:
            settings = shortened(line.unlike)
            notes.append(f"{line.row.title}: the settings are not the table's ({settings}), so no difference is given.")
    for line in lines:
        if line.uneven and AVERAGE in line.ours:
            notes.append(f"{line.row.title}: the average rests on fewer seeds than its columns, so it has no verdict.")
    for absent in block.absent:
        notes.append(f"{absent.printed}: not run ({absent.why}).")
    return notes


def notes_on_runs(
    block: Block,
    runs: Runs,
    cells: pd.DataFrame,
    targets: list[str],
    select: str,
) -> list[str]:
    """Return the notes that a comparison of these runs has, too: missing runs, splits, test images, rounds."""
    present = set(cells["target"])
    asked = [target for target in targets if target in present] if runs.only else targets
    unfinished = [run for run in runs.unfinished if block.name in run.split("/")]
    return [
        *notes_on_others(runs, set(cells["run"]), targets),
        *missing_notes(cells, asked, paired=False),
        *split_notes(cells),
        *test_size_notes(cells, "images"),
        *unfinished_notes(unfinished),
        *damaged_notes(runs.damaged),
        *round_notes(part_of(runs, list(dict.fromkeys(cells["run"]))), select),
    ]


def notes_on_others(runs: Runs, shown: set[str], targets: Sequence[str]) -> list[str]:
    """Return notes on the runs that are left out: those of other methods or settings, and those on other targets."""
    labels = runs.labels()
    of_no_row: Counter[str] = Counter()
    on_no_target: Counter[str] = Counter()
    for run, target in zip(runs.summary["run"], runs.summary["target"]):
        if run in shown:
            continue
        if target in targets:
            of_no_row[labels[run]] += 1
        else:
            on_no_target[f"{labels[run]} on {target}"] += 1
    notes = []
    for what, counts in (("of no row", of_no_row), ("on no target", on_no_target)):
        texts = []
        for label, count in sorted(counts.items()):
            runs_text = "1 run" if count == 1 else f"{count} runs"
            texts.append(f"{label} ({runs_text})")
        if texts:
            notes.append(f"Runs {what} of the table, which are left out: {shortened(texts)}.")
    return notes


def table_of(result: Reproduction) -> Table:
    """Return the block as a table: our numbers of each row, then the paper's and the difference if it has the row."""
    targets = (*result.targets, AVERAGE)
    counts = {numbers.seeds for line in result.lines for numbers in line.ours.values()}
    rows = []
    for line in result.lines:
        label = line.row.title if len(counts) <= 1 else f"{line.row.title} ({seeds_text(line)})"
        ours = [number_cell(line.ours, target) for target in targets]
        rows.append(Row([label, *ours], is_apart=True))
        if line.theirs:
            theirs = [number_cell(line.theirs, target) for target in targets]
            differences = [difference_text(line, target) for target in targets]
            rows.append(Row([result.block.published, *theirs], kind="detail"))
            rows.append(Row(["difference", *differences], kind="detail"))
    columns = [LABEL, *map(Column, result.targets), Column("Average")]
    return Table(columns, rows, result.title, notes=result.notes)


def seeds_text(line: Line) -> str:
    """`3 seeds`, or `1 to 3 seeds` where a seed lacks a target."""
    counts = [numbers.seeds for numbers in line.ours.values()]
    few, many = min(counts), max(counts)
    if many == 1:
        return f"{few} seed"
    return f"{many} seeds" if few == many else f"{few} to {many} seeds"


def number_cell(numbers: Mapping[str, Numbers], target: str) -> Cell:
    """Return mean and spread of a target in percent; a dash where there are none."""
    of_target = numbers.get(target, Numbers())
    spread = "" if math.isnan(of_target.std) else percent(of_target.std)
    return Cell(percent(of_target.mean), spread)


def difference_text(line: Line, target: str) -> str:
    """`+0.2 inside`; a dash where no difference is given."""
    gap = line.difference(target)
    return MISSING if math.isnan(gap) else f"{100 * gap:+.1f} {line.verdict(target)}".rstrip()


def csv_rows(results: Sequence[Reproduction]) -> list[dict[str, Any]]:
    """Return one row per block, method and target, in full precision."""
    rows = []
    for result in results:
        for line in result.lines:
            for target in (*result.targets, AVERAGE):
                rows.append(csv_row(result, line, target))
    return rows


def csv_row(result: Reproduction, line: Line, target: str) -> dict[str, Any]:
    """Return the columns of one target of a line; what is not known is None."""
    ours = line.ours.get(target, Numbers())
    theirs = line.theirs.get(target, Numbers())
    return {
        "block": result.block.name,
        "row": line.row.title,
        "method": " ".join([line.row.method, *line.row.settings]),
        "target": target,
        "mean": none_for_nan(ours.mean),
        "std": none_for_nan(ours.std),
        "seeds": ours.seeds,
        "source": result.block.published,
        "published_mean": none_for_nan(theirs.mean),
        "published_std": none_for_nan(theirs.std),
        "difference": none_for_nan(line.difference(target)),
        "verdict": line.verdict(target),
        "other_settings": shortened(line.unlike),
    }


def none_for_nan(value: float) -> float | None:
    """Return the number, or None for NaN."""
    return None if math.isnan(value) else value


def render(results: Sequence[Reproduction], form: str) -> str:
    """Return the blocks as text; form: `csv`, `markdown` or `latex`."""
    if form == "csv":
        rows = csv_rows(results)
        return csv_text(rows[0] if rows else ["block"], rows)
    tables = [table_of(result) for result in results]
    if form == "markdown":
        return "\n".join(table.markdown() for table in tables)
    shown = [result.select == "oracle" for result in results]  # an oracle's title is in the table: nobody overlooks it
    return "\n".join(
        table.latex(has_lines=False, shows_title=shows_title) for table, shows_title in zip(tables, shown, strict=True)
    )


def show(results: Sequence[Reproduction], console: Console) -> None:
    """Print the blocks to the terminal."""
    for result in results:
        table_of(result).show(console)
