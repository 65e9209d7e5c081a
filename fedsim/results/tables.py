"""A comparison as terminal table, CSV or Markdown; LaTeX has a file of its own."""

import io
import re
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from fedsim.common.console import Terminal
from fedsim.common.tasks import CLASSIFICATION
from fedsim.results.cell_texts import (
    accuracy_cells,
    by_group,
    further_cells,
    further_columns,
    head,
    plain,
    published_cells,
    shown_label,
)
from fedsim.results.compared import Compared
from fedsim.results.latex import latex_table
from fedsim.results.recorder import csv_text


def accuracy_table(comparison: Compared) -> Table:
    """Rich table of the accuracies; published rows are below a line."""
    styles = {0: "", 1: "bold green", 2: "underline"}
    cells = accuracy_cells(comparison)
    table = _table(
        comparison,
        f"{escape(comparison.title)}\n{comparison.measured} (%)",
        head(comparison)[1:],
        lambda row: [Text(plain(cell), styles[cell.place]) for cell in cells[row["label"]]],
    )
    for label, printed in published_cells(comparison):
        table.add_row(escape(label), *map(plain, printed), style="dim italic")
    return table


def further_table(comparison: Compared) -> Table:
    """Rich table of seeds, ranks, tests and costs."""
    heads = further_columns(comparison).values()
    return _table(comparison, "rank, test and cost", heads, lambda row: further_cells(comparison, row))


def _table(
    comparison: Compared, title: str, heads: Iterable[str], cells_of: Callable[[pd.Series], Iterable[str | Text]]
) -> Table:
    """A row per method, and a line below each group."""
    columns = (Column(escape(name), justify="right") for name in heads)
    table = Table("Method", *columns, title=title, title_justify="left")
    for group in by_group(comparison):
        for _, row in group.iterrows():
            table.add_row(escape(shown_label(row)), *cells_of(row))
        table.add_section()
    return table


def print_table(comparison: Compared, console: Console | None = None) -> None:
    """Print two tables, one under the other, then the notes.

    Output that does not go to a terminal is as wide as needed, so that no cell is broken into lines.
    """
    console = console or Terminal()
    tables = [accuracy_table(comparison), further_table(comparison)]
    needed = max(Measurement.get(console, console.options.update(max_width=10_000), table).maximum for table in tables)
    if not console.is_terminal:
        console.width = max(console.width, needed)
    for table in tables:
        console.print(table)
    for note in comparison.notes:
        console.print(f"- {note}", markup=False, highlight=False)


def table_text(comparison: Compared) -> str:
    """The terminal's tables as plain text, never wrapped."""
    buffer = io.StringIO()
    print_table(comparison, Terminal(file=buffer, width=100, color_system=None))
    return buffer.getvalue()


def csv_table(comparison: Compared) -> str:
    """CSV with one line per method: numbers in full precision, accuracies as fractions, published rows below ours."""
    rows: list[dict[str, Any]] = []
    for _, method in comparison.methods.iterrows():
        cells = comparison.cells[comparison.cells["label"] == method["label"]]
        row = {"label": method["label"], "method": method["method"], "source": "ours", "select": comparison.select}
        row |= {"metric": comparison.metric} if comparison.metric != CLASSIFICATION.metric else {}
        rest = {key: value for key, value in method.items() if key not in (*row, "average", "average_std", "seeds")}
        rows.append(row | _wide(cells) | rest)
    for (label, source), cells in comparison.published.groupby(["label", "source"], sort=False):
        rows.append({"label": label, "method": cells["method"].iloc[0], "source": source} | _wide(cells))
    header = dict.fromkeys(key for row in rows for key in row)
    clean = [{key: None if pd.isna(value) else value for key, value in row.items()} for row in rows]
    return csv_text(header, clean)


def _wide(cells: pd.DataFrame) -> dict[str, Any]:
    kinds = [kind for kind in ("mean", "std", "seeds") if kind in cells]
    return {f"{cell['target']}_{kind}": cell[kind] for _, cell in cells.iterrows() for kind in kinds}


def markdown_table(comparison: Compared) -> str:
    """GitHub Markdown with the best of each column bold; names are escaped, so that they are shown as written."""
    heads = [*head(comparison), *further_columns(comparison).values()]
    title = escape_markdown(comparison.title)
    lines = [f"**{title}**", "", _markdown_row(map(escape_markdown, heads)), "|---|" + "---:|" * (len(heads) - 1)]
    cells = accuracy_cells(comparison)
    for _, row in comparison.methods.iterrows():
        texts = [
            plain(cell).replace(cell.mean, f"**{cell.mean}**", 1) if cell.place == 1 else plain(cell)
            for cell in cells[row["label"]]
        ]
        further = map(escape_markdown, further_cells(comparison, row))
        lines.append(_markdown_row([escape_markdown(shown_label(row)), *texts, *further]))
    for label, printed in published_cells(comparison):
        empty = [""] * len(further_columns(comparison))
        lines.append(_markdown_row([f"_{escape_markdown(label)}_", *map(plain, printed), *empty]))
    return "\n".join([*lines, "", *(f"- {escape_markdown(note)}" for note in comparison.notes)]) + "\n"


def escape_markdown(text: str) -> str:
    """Text that GitHub shows as written, without emphasis, code, links, HTML, mathematics or table lines.

    An underscore inside a word (`art_painting`) means no emphasis and is not escaped.
    """
    one_line = " ".join(text.splitlines())
    escaped = re.sub(r"([\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", one_line)
    return re.sub(r"^([#+-])", r"\\\1", escaped) if re.match(r"[#+-]\s", escaped) else escaped


def _markdown_row(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


FORMATS = {"table": table_text, "csv": csv_table, "markdown": markdown_table, "latex": latex_table}
