"""A reproduction of a paper's table as text: terminal, CSV, Markdown, LaTeX."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fedsim.common.errors import printable
from fedsim.data.benchmarks import AVERAGE
from fedsim.results.cell_texts import MISSING, CellText, percent, plain
from fedsim.results.latex import escape_latex, latex_number, latex_row, table_begin
from fedsim.results.published import shortened
from fedsim.results.recorder import csv_text
from fedsim.results.tables import escape_markdown
from fedsim.sweep.reproduction import Line, Numbers, Reproduction


def texts(result: Reproduction) -> list[tuple[str, list[str]]]:
    """(name, cells) of every printed line: our numbers, then the paper's and the difference if it has the row."""
    found = []
    uneven = len({cell.seeds for line in result.lines for cell in line.ours.values()}) > 1
    for line in result.lines:
        columns = (*result.targets, AVERAGE)
        title = f"{line.row.title} ({_seeds(line)})" if uneven else line.row.title
        found.append((title, [_number(line.ours, target) for target in columns]))
        if line.theirs:
            found.append((f"  {result.block.published}", [_number(line.theirs, target) for target in columns]))
            found.append(("  difference", [_difference(line, target) for target in columns]))
    return found


def _seeds(line: Line) -> str:
    """`3 seeds`, or `1 to 3 seeds` where a seed lacks a target."""
    counts = [cell.seeds for cell in line.ours.values()]
    few, many = min(counts), max(counts)
    return f"{few} seed" if many == 1 else f"{many} seeds" if few == many else f"{few} to {many} seeds"


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
    columns = (Column(escape(name), justify="right") for name in (*result.targets, "Average"))
    table = Table("Method", *columns, title=escape(result.title), title_justify="left")
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
    """The block as a booktabs table; the title and the notes are comments."""
    heads = [escape_latex(name) for name in ("Method", *result.targets, "Average")]
    lines = [*table_begin(result.title, len(heads), result.select), latex_row(heads), "\\midrule"]
    for head, cells in texts(result):
        name = "\\quad " + escape_latex(head.strip()) if head.startswith(" ") else escape_latex(head)
        lines.append(latex_row([name, *map(latex_number, cells)]))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in result.notes)]) + "\n"


def render(results: Sequence[Reproduction], form: str) -> str:
    """The blocks as text; form: `csv`, `markdown` or `latex`."""
    if form == "csv":
        rows = csv_rows(results)
        return csv_text(rows[0] if rows else ["block"], rows)
    return printable("\n".join({"markdown": markdown, "latex": latex}[form](result) for result in results))


def show(results: Sequence[Reproduction], console: Console) -> None:
    """Print the blocks to the terminal."""
    for result in results:
        table = rich_table(result)
        if not console.is_terminal:
            console.width = max(console.width, 200)
        console.print(table)
        for note in result.notes:
            console.print(f"- {note}", markup=False, highlight=False)
