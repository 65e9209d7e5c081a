"""Our runs of a paper's table beside the printed numbers: differences, and whether they are within the paper's ±."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsim.data import benchmark
from fedsim.errors import UserError, nearest
from fedsim.results.cell_texts import MISSING, CellText, percent, plain
from fedsim.results.latex import escape_latex
from fedsim.results.published import domain_key, printed_numbers, protocol_differences, shortened
from fedsim.results.reading import Runs, of_experiment
from fedsim.results.recorder import csv_text
from fedsim.results.selection import RULE_TITLES, RULES
from fedsim.results.statistics import mean_and_std, per_seed_average
from fedsim.results.tables import escape_markdown
from fedsim.sweep.tables import COPY, Block, PaperRow, PaperTable, read_table, row_experiment
from fedsim.variants import method_label

AVERAGE = "average"


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
    """

    row: PaperRow
    ours: dict[str, Numbers] = field(default_factory=dict)
    theirs: dict[str, Numbers] = field(default_factory=dict)
    unlike: list[str] = field(default_factory=list)

    def difference(self, target: str) -> float:
        """Our number minus the paper's, as a fraction; NaN when one is missing or the protocols differ."""
        if self.unlike:
            return math.nan
        return self.ours.get(target, Numbers()).mean - self.theirs.get(target, Numbers()).mean

    def verdict(self, target: str) -> str:
        """`inside` when the difference is at most the paper's ±, else `outside`; empty when the paper prints no ±."""
        gap, allowed = abs(self.difference(target)), self.theirs.get(target, Numbers()).std
        if math.isnan(gap) or math.isnan(allowed):
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


def reproductions(folder: Path, runs: Runs, select: str = "best_validation") -> list[Reproduction]:
    """Every block of the table in FOLDER/table.toml that has runs, under one selection rule."""
    if select not in RULES:
        raise UserError(f"unknown selection rule {select!r}; {nearest(select, RULES)}known: {', '.join(RULES)}")
    table = read_table(folder / COPY)
    found = [(block, of_experiment(runs, block.name)) for block in table.blocks]
    return [_block(table, block, own, select) for block, own in found if len(own.summary)]


def _block(table: PaperTable, block: Block, runs: Runs, select: str) -> Reproduction:
    base = row_experiment(block, block.rows[0])
    labels = _labels(runs)
    targets = list(benchmark(base.data).domains) if block.targets == ["all"] else list(block.targets)
    printed = printed_numbers(block.published, base)
    lines = [_line(block, row, runs, labels, printed, targets, select) for row in block.rows]
    lines = [line for line in lines if line.ours]
    title = f"{table.title} - {block.name}: {RULE_TITLES[select]}"
    return Reproduction(block, title, targets, lines, _notes(table, block, lines, select))


def _labels(runs: Runs) -> dict[str, str]:
    """{run: label of its recipe}; the label is empty when the run's method does not exist any more."""
    known: dict[str, str] = {}
    found = {}
    for run in runs.summary["run"]:
        experiment = runs.experiments[run]
        key = json.dumps([experiment.method, experiment.parts], sort_keys=True)
        if key not in known:
            known[key] = ""
            with contextlib.suppress(UserError):
                known[key] = method_label(experiment)
        found[run] = known[key]
    return found


def _line(
    block: Block,
    row: PaperRow,
    runs: Runs,
    labels: Mapping[str, str],
    printed: pd.DataFrame,
    targets: list[str],
    select: str,
) -> Line:
    wanted = row_experiment(block, row, targets[0])
    own = [run for run, label in labels.items() if label == method_label(wanted)]
    line = Line(row, _ours(runs, own, targets, select), _theirs(printed, row.printed, targets))
    reference = {target: row_experiment(block, row, target) for target in targets}
    shown = runs.labels()
    for run in own:
        name, ours = shown[run].partition("@")[0], runs.experiments[run]
        line.unlike += [f"it runs as {name}"] if name != row.method else []  # such as ccst(pixel)
        line.unlike += [
            text
            for text in protocol_differences(ours, reference[ours.run.target])
            if not text.startswith("method.")  # the recipes are equal, even if their settings are written differently
        ]
    return line


def _ours(runs: Runs, own: Sequence[str], targets: list[str], select: str) -> dict[str, Numbers]:
    table = runs.summary[runs.summary["run"].isin(own)]
    if table.empty:
        return {}
    grid = table.pivot_table(index="seed", columns="target", values=f"{select}_target_accuracy")
    grid = grid.reindex(columns=targets)
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
        notes.append("ORACLE: the round was chosen on the target's labels. An upper bound, not a result.")
    notes += [
        f"{line.row.title}: the settings are not the table's ({shortened(line.unlike)}), so no difference is given."
        for line in lines
        if line.unlike
    ]
    notes += [f"{absent.printed}: not run ({absent.why})." for absent in block.absent]
    return notes


# --- as text ----------------------------------------------------------------------------------------------------


def texts(result: Reproduction) -> list[tuple[str, list[str]]]:
    """(name, cells) of every printed line: our numbers, then the paper's and the difference if it has the row."""
    found = []
    for line in result.lines:
        columns = (*result.targets, AVERAGE)
        found.append((line.row.title, [_number(line.ours, target) for target in columns]))
        if line.theirs:
            found.append((f"  {result.block.published}", [_number(line.theirs, target) for target in columns]))
            found.append(("  difference", [_difference(line, target) for target in columns]))
    return found


def _number(numbers: Mapping[str, Numbers], target: str) -> str:
    cell = numbers.get(target, Numbers())
    return plain(CellText(percent(cell.mean), "" if math.isnan(cell.std) else percent(cell.std)))


def _difference(line: Line, target: str) -> str:
    gap = line.difference(target)
    return MISSING if math.isnan(gap) else f"{100 * gap:+.1f} {line.verdict(target)}".rstrip()


def csv_rows(results: Sequence[Reproduction]) -> list[dict[str, Any]]:
    """One row per block, method and target, in full precision."""
    return [
        {
            "block": result.block.name,
            "row": line.row.title,
            "method": " ".join([line.row.method, *line.row.settings]),
            "target": target,
            "mean": _known(line.ours.get(target, Numbers()).mean),
            "std": _known(line.ours.get(target, Numbers()).std),
            "seeds": line.ours.get(target, Numbers()).seeds,
            "source": result.block.published,
            "published_mean": _known(line.theirs.get(target, Numbers()).mean),
            "published_std": _known(line.theirs.get(target, Numbers()).std),
            "difference": _known(line.difference(target)),
            "verdict": line.verdict(target),
            "other_settings": shortened(line.unlike),
        }
        for result in results
        for line in result.lines
        for target in (*result.targets, AVERAGE)
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def rich_table(result: Reproduction) -> Table:
    """The block as a table for the terminal; every row of the paper's table is a section."""
    table = Table(title=escape(result.title), title_justify="left")
    table.add_column("Method")
    for name in (*result.targets, "Average"):
        table.add_column(escape(name), justify="right")
    for number, (head, cells) in enumerate(texts(result)):
        if number and not head.startswith(" "):
            table.add_section()
        table.add_row(escape(head), *cells, style="dim" if head.startswith(" ") else "")
    return table


def markdown(result: Reproduction) -> str:
    """GitHub Markdown."""
    heads = ["Method", *map(escape_markdown, result.targets), "Average"]
    lines = [f"**{escape_markdown(result.title)}**", "", f"| {' | '.join(heads)} |", "|---|" + "---:|" * len(heads[1:])]
    for head, cells in texts(result):
        name = f"_{escape_markdown(head.strip())}_" if head.startswith(" ") else escape_markdown(head)
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join([*lines, "", *(f"- {escape_markdown(note)}" for note in result.notes)]) + "\n"


def latex(result: Reproduction) -> str:
    """The block as a booktabs table; the notes follow as comments."""
    heads = [escape_latex(name) for name in ("Method", *result.targets, "Average")]
    lines = ["\\begin{tabular}{l" + "r" * len(heads[1:]) + "}", "\\toprule", " & ".join(heads) + " \\\\", "\\midrule"]
    for head, cells in texts(result):
        name = "\\quad " + escape_latex(head.strip()) if head.startswith(" ") else escape_latex(head)
        lines.append(" & ".join([name, *map(_latex_cell, cells)]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in result.notes)]) + "\n"


def _latex_cell(text: str) -> str:
    return f"$-${escape_latex(text[1:])}" if text.startswith("-") else escape_latex(text)


def render(results: Sequence[Reproduction], form: str) -> str:
    """The blocks as text; form: `csv`, `markdown` or `latex`."""
    if form == "csv":
        rows = csv_rows(results)
        return csv_text(rows[0] if rows else ["block"], rows)
    return "\n".join({"markdown": markdown, "latex": latex}[form](result) for result in results)


def show(results: Sequence[Reproduction], console: Console) -> None:
    """Print the blocks to the terminal."""
    for result in results:
        table = rich_table(result)
        if not console.is_terminal:
            console.width = max(console.width, 200)
        console.print(table)
        for note in result.notes:
            console.print(f"- {note}", markup=False, highlight=False)
