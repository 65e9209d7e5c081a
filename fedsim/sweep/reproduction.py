"""Our runs of a paper's table beside the printed numbers: differences, and whether they are within the paper's ±."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from fedsim.common.errors import UserError, nearest
from fedsim.data.benchmarks import AVERAGE
from fedsim.methods.registry import refuse_outside
from fedsim.results.differences import differing_settings, refuse_twice
from fedsim.results.notes import (
    damaged_notes,
    missing_notes,
    part_notes,
    round_notes,
    split_notes,
    test_size_notes,
    unfinished_notes,
)
from fedsim.results.provenance import environments, provenance_notes, refuse_unlike
from fedsim.results.published import domain_key, printed_numbers, protocol_differences, shortened
from fedsim.results.reading import Runs, of_experiment, part_of
from fedsim.results.selection import RULES, rule_title
from fedsim.results.statistics import grid_of, mean_and_std, per_seed_average
from fedsim.sweep.plan import once
from fedsim.sweep.tables import (
    COPY,
    Block,
    PaperRow,
    PaperTable,
    block_targets,
    known_label,
    read_table,
    row_experiment,
    rows_by_label,
)


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


def reproductions(folder: Path, runs: Runs, select: str = "best_validation", trust: bool = False) -> list[Reproduction]:
    """Every block of the table in FOLDER/table.toml that has runs, under one selection rule.

    UserError for a table that names modules outside fedsim, without trust.
    """
    if select not in RULES:
        raise UserError(f"unknown selection rule {select!r}; {nearest(select, RULES)}known: {', '.join(RULES)}")
    table = read_table(folder / COPY)
    for block in table.blocks:
        for row in block.rows:
            refuse_outside(row_experiment(block, row), folder / COPY, trust)
    found = [(block, of_experiment(runs, block.name)) for block in table.blocks]
    return [_block(table, block, own, select) for block, own in found if len(own.summary)]


def _block(table: PaperTable, block: Block, runs: Runs, select: str) -> Reproduction:
    base = row_experiment(block, block.rows[0])
    labels = _labels(runs)
    targets = block_targets(block, base.data)
    printed = printed_numbers(block.published, base)
    cells = _cells(block, runs, labels, targets, select)
    for row in block.rows:
        _refuse_mixed(block, row, runs, cells)
    recorded = {run: own for run, own in environments(runs).items() if run in set(cells["run"])}
    refuse_unlike(runs, recorded, dict(zip(cells["run"], cells["label"])))
    refuse_twice(cells)
    lines = [_line(block, row, runs, cells, printed, targets) for row in block.rows]
    lines = [line for line in lines if line.ours]
    rule = rule_title(select, [runs.experiments[run] for run in cells["run"]])
    title = f"{table.title} - {block.name}: {rule}"
    notes = _notes(table, block, lines, select) + _notes_on_runs(block, runs, cells, targets, select)
    notes = part_notes(runs.only) + notes + provenance_notes(recorded)
    return Reproduction(block, title, targets, lines, notes, select)


def _cells(block: Block, runs: Runs, labels: Mapping[str, str], targets: list[str], select: str) -> pd.DataFrame:
    """A row for each run of the block's rows and targets.

    Its columns are label (the row's title), run, target, seed, accuracy, split_seed, target_images.
    """
    of_label = {label: row.title for label, row in rows_by_label(block).items()}
    own = runs.summary[runs.summary["run"].map(labels).isin(list(of_label)) & runs.summary["target"].isin(targets)]
    columns = {"run": own["run"], "target": own["target"], "seed": own["seed"]}
    columns |= {name: own.get(name, pd.Series(dtype=float)) for name in ("split_seed", "target_images")}
    accuracy = own.get(f"{select}_target_accuracy", pd.Series(dtype=float))
    return pd.DataFrame({"label": own["run"].map(labels).map(of_label), **columns, "accuracy": accuracy.astype(float)})


def _refuse_mixed(block: Block, row: PaperRow, runs: Runs, cells: pd.DataFrame) -> None:
    """UserError when the runs of a row differ in settings: an average over them would be of several experiments.

    A part in [parts] that the row does not have changes nothing, so that the runs may differ in it.
    """
    own = cells.loc[cells["label"] == row.title, "run"]
    idle = tuple(f"parts.{part}." for method, part in runs.unused_parts if method == row.method)
    differing = differing_settings(runs.comparable[run] for run in own)
    named = [f"{key} ({' | '.join(values)})" for key, values in differing.items() if not key.startswith(idle)]
    if named:
        raise UserError(
            f"block {block.name!r} of the table: the runs of the row {row.title!r} differ in more than target and "
            f"seed: {', '.join(named)}; move the runs of one setting to another folder, or choose runs that are alike "
            "with --seeds or --targets"
        )


def _labels(runs: Runs) -> dict[str, str]:
    """{run: the known label of its recipe}."""
    label = once(known_label, lambda own: json.dumps([own.method, own.parts], sort_keys=True))
    return {run: label(runs.experiments[run]) for run in runs.summary["run"]}


def _line(
    block: Block, row: PaperRow, runs: Runs, cells: pd.DataFrame, printed: pd.DataFrame, targets: list[str]
) -> Line:
    own = cells[cells["label"] == row.title]
    ours = _ours(cells, row.title, targets)
    uneven = len({numbers.seeds for numbers in ours.values()}) > 1
    line = Line(row, ours, _theirs(printed, row.printed, targets), uneven=uneven)
    reference = {target: row_experiment(block, row, target) for target in own["target"].unique()}
    shown = runs.labels()
    for run, target in zip(own["run"], own["target"]):
        name = shown[run].partition("@")[0]
        line.unlike += [f"it runs as {name}"] if name != row.method else []  # such as ccst(pixel)
        line.unlike += [
            text
            for text in protocol_differences(runs.experiments[run], reference[target])
            if not text.startswith("method.")  # the recipes are equal, even if their settings are written differently
        ]
    return line


def _ours(table: pd.DataFrame, title: str, targets: list[str]) -> dict[str, Numbers]:
    grid = grid_of(table, title).reindex(columns=targets)
    cells = {target: mean_and_std(grid[target]) for target in targets}
    cells[AVERAGE] = mean_and_std(per_seed_average(grid, targets))
    return {target: Numbers(**cell) for target, cell in cells.items() if cell["seeds"]}


def _theirs(printed: pd.DataFrame, name: str, targets: list[str]) -> dict[str, Numbers]:
    ours = {domain_key(target): target for target in targets} | {AVERAGE: AVERAGE}
    rows = printed[printed["method"] == name]
    return {
        ours[row["target"]]: Numbers(row["mean"], row["std"]) for _, row in rows.iterrows() if row["target"] in ours
    }


def _notes(table: PaperTable, block: Block, lines: Sequence[Line], select: str) -> list[str]:
    seeds = max((cell.seeds for line in lines for cell in line.ours.values()), default=0)
    paper = block.published or "no printed number is known here"
    notes = [
        f"Accuracy on the unseen domain in %; ours: mean ± sample standard deviation over up to {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'} ({len(table.seeds)} in the table's file); theirs: {paper}.",
        f"The paper's ±: {table.deviation}. inside: the difference is at most that ±; without a ± there is no verdict.",
    ]
    if select == "oracle":
        notes.append("ORACLE: the round was chosen on the unseen domain's labels. An upper bound, not a result.")
    notes += [
        f"{line.row.title}: the settings are not the table's ({shortened(line.unlike)}), so no difference is given."
        for line in lines
        if line.unlike
    ]
    notes += [
        f"{line.row.title}: the average rests on fewer seeds than its columns, so it has no verdict."
        for line in lines
        if line.uneven and AVERAGE in line.ours
    ]
    notes += [f"{absent.printed}: not run ({absent.why})." for absent in block.absent]
    return notes


def _other_notes(runs: Runs, shown: set[str], targets: Sequence[str]) -> list[str]:
    """Notes on the runs that are left out: those of other methods or settings of them, and those on other targets."""
    labels = runs.labels()
    left = [
        (labels[run], target) for run, target in zip(runs.summary["run"], runs.summary["target"]) if run not in shown
    ]
    no_row = Counter(label for label, target in left if target in targets)
    no_target = Counter(f"{label} on {target}" for label, target in left if target not in targets)
    notes = []
    for what, counts in (("of no row", no_row), ("on no target", no_target)):
        texts = [f"{label} ({count} {'run' if count == 1 else 'runs'})" for label, count in sorted(counts.items())]
        notes += [f"Runs {what} of the table, which are left out: {shortened(texts)}."] if texts else []
    return notes


def _notes_on_runs(block: Block, runs: Runs, cells: pd.DataFrame, targets: list[str], select: str) -> list[str]:
    """The notes that a comparison of these runs has, too: missing and unfinished ones, splits, test images, rounds."""
    asked = [target for target in targets if target in set(cells["target"])] if runs.only else targets
    notes = _other_notes(runs, set(cells["run"]), targets) + missing_notes(cells, asked, paired=False)
    notes += split_notes(cells) + test_size_notes(cells)
    unfinished = [run for run in runs.unfinished if block.name in run.split("/")]
    notes += unfinished_notes(unfinished) + damaged_notes(runs.damaged)
    return notes + round_notes(part_of(runs, list(cells["run"])), select)
