"""A comparison as terminal table, CSV, Markdown or LaTeX (booktabs; best bold, second underlined)."""

import io
import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fedsim.results.compare import Comparison
from fedsim.results.recorder import csv_text

MISSING = "\N{EN DASH}"
SPECIAL = {
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
}


@dataclass(frozen=True)
class Cell:
    """One accuracy as text: mean, spread (empty for one seed) and its place in the column (1, 2 or 0)."""

    mean: str
    std: str = ""
    place: int = 0


def percent(value: float) -> str:
    """Fraction -> percent with one decimal, a dash for NaN."""
    return MISSING if pd.isna(value) else f"{100 * value:.1f}"


def amount(size: float) -> str:
    """Bytes in decimal units: `134.4 MB`."""
    if pd.isna(size):
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def accuracy_cells(comparison: Comparison) -> dict[str, dict[str, Cell]]:
    """{label: {target or `average`: Cell}} with the first and second place of each column by the printed number."""
    texts = comparison.cells.assign(
        text=comparison.cells["mean"].map(percent), spread=comparison.cells["std"].map(percent)
    )
    cells: dict[str, dict[str, Cell]] = {}
    for target, column in texts.groupby("target", sort=False):
        # By the printed number: two equal texts of which only one is bold would puzzle a reader.
        ordered = sorted({float(text) for text in column["text"] if text != MISSING}, reverse=True)
        for _, row in column.iterrows():
            place = ordered.index(float(row["text"])) + 1 if row["text"] != MISSING else 0
            std = "" if row["spread"] == MISSING else row["spread"]
            cells.setdefault(row["label"], {})[str(target)] = Cell(row["text"], std, place if place <= 2 else 0)
    return cells


def further_columns(comparison: Comparison) -> list[str]:
    """Heads of the columns that follow the accuracies."""
    tests = [f"Δ {comparison.baseline}", "p"] if comparison.baseline else []
    return ["Seeds", "Rank", *tests, "Down/round", "Up/round", "s/round"]


def further_cells(comparison: Comparison, row: pd.Series) -> list[str]:
    """Texts of the columns that follow the accuracies."""
    tests = []
    if comparison.baseline:
        difference, p_value = row["difference"], row["p_value"]
        tests = [
            MISSING if pd.isna(difference) else f"{100 * difference:+.1f}",
            MISSING if pd.isna(p_value) else ("<.001" if p_value < 0.001 else f"{p_value:.3f}".lstrip("0")),
        ]
    seconds = row["seconds_per_round"]
    return [
        str(row["seeds"]),
        MISSING if pd.isna(row["rank"]) else str(row["rank"]),
        *tests,
        amount(row["bytes_down_per_round"]),
        amount(row["bytes_up_per_round"]),
        MISSING if pd.isna(seconds) else f"{seconds:.1f}",
    ]


def published_cells(comparison: Comparison) -> list[tuple[str, str, dict[str, Cell]]]:
    """(label, source, {target: Cell}) of the papers' rows."""
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    for _, row in comparison.published.iterrows():
        std = "" if math.isnan(row["std"]) else percent(row["std"])
        rows.setdefault((row["label"], row["source"]), {})[row["target"]] = Cell(percent(row["mean"]), std)
    return [(label, source, cells) for (label, source), cells in rows.items()]


def shown_label(row: pd.Series) -> str:
    """Label of a method; a dagger marks transductive ones."""
    return row["label"] + (" †" if row["transductive"] else "")


def _plain(cell: Cell) -> str:
    return f"{cell.mean} ± {cell.std}" if cell.std else cell.mean


def _head(comparison: Comparison) -> list[str]:
    return ["Method", *comparison.targets, "Average"]


def accuracy_table(comparison: Comparison) -> Table:
    """Rich table of the accuracies, published rows below a rule."""
    styles = {0: "", 1: "bold green", 2: "underline"}
    table = Table(title=f"{escape(comparison.title)}\naccuracy on the unseen domain (%)", title_justify="left")
    table.add_column("Method")
    for name in _head(comparison)[1:]:
        table.add_column(escape(name), justify="right")
    cells = accuracy_cells(comparison)
    for _, row in comparison.methods.iterrows():
        values = [cells[row["label"]][target] for target in (*comparison.targets, "average")]
        table.add_row(escape(shown_label(row)), *(_styled(cell, styles[cell.place]) for cell in values))
    table.add_section()
    for label, source, values in published_cells(comparison):
        row = [values.get(target, Cell(MISSING)) for target in (*comparison.targets, "average")]
        table.add_row(escape(f"{label} ({source}, published)"), *(_plain(cell) for cell in row), style="dim italic")
    return table


def _styled(cell: Cell, style: str) -> str:
    return f"[{style}]{_plain(cell)}[/]" if style else _plain(cell)


def further_table(comparison: Comparison) -> Table:
    """Rich table of seeds, ranks, tests and costs."""
    table = Table(title="rank, test and cost", title_justify="left")
    table.add_column("Method")
    for name in further_columns(comparison):
        table.add_column(escape(name), justify="right")
    for _, row in comparison.methods.iterrows():
        table.add_row(escape(shown_label(row)), *further_cells(comparison, row))
    return table


def print_table(comparison: Comparison, console: Console | None = None) -> None:
    """Two tables under each other, then the notes; wider than the terminal rather than with broken cells."""
    console = console or Console()
    tables = [accuracy_table(comparison), further_table(comparison)]
    needed = max(Measurement.get(console, console.options.update(max_width=10_000), table).maximum for table in tables)
    if not console.is_terminal:
        console.width = max(console.width, needed)
    for table in tables:
        console.print(table)
    for note in comparison.notes:
        console.print(f"- {note}", markup=False, highlight=False)


def table_text(comparison: Comparison) -> str:
    """The terminal's tables as plain text, never wrapped."""
    buffer = io.StringIO()
    print_table(comparison, Console(file=buffer, width=100, color_system=None))
    return buffer.getvalue()


def csv_table(comparison: Comparison) -> str:
    """One line per method, numbers in full precision, accuracies as fractions; published rows below ours."""
    rows: list[dict[str, Any]] = []
    for _, method in comparison.methods.iterrows():
        cells = comparison.cells[comparison.cells["label"] == method["label"]]
        row = {"label": method["label"], "method": method["method"], "source": "ours", "select": comparison.select}
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


def markdown_table(comparison: Comparison) -> str:
    """GitHub Markdown, best of each column bold."""
    heads = [*_head(comparison), *further_columns(comparison)]
    lines = [f"**{comparison.title}**", "", _markdown_row(heads), "|---|" + "---:|" * (len(heads) - 1)]
    cells = accuracy_cells(comparison)
    for _, row in comparison.methods.iterrows():
        values = [cells[row["label"]][target] for target in (*comparison.targets, "average")]
        texts = [
            _plain(cell).replace(cell.mean, f"**{cell.mean}**", 1) if cell.place == 1 else _plain(cell)
            for cell in values
        ]
        lines.append(_markdown_row([shown_label(row), *texts, *further_cells(comparison, row)]))
    for label, source, values in published_cells(comparison):
        texts = [_plain(values.get(target, Cell(MISSING))) for target in (*comparison.targets, "average")]
        empty = [""] * len(further_columns(comparison))
        lines.append(_markdown_row([f"_{label} ({source}, published)_", *texts, *empty]))
    return "\n".join([*lines, "", *(f"- {note}" for note in comparison.notes)]) + "\n"


def _markdown_row(texts: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def escape_latex(text: str) -> str:
    """Text with TeX's special characters escaped, Greek and typographic signs as commands."""
    escaped = "".join(SPECIAL.get(sign, sign) for sign in text)
    for sign, command in (
        (MISSING, "--"),
        ("±", r"$\pm$"),
        ("Δ", r"$\Delta$"),
        ("†", r"$^\dagger$"),
        ("<", "$<$"),
        (">", "$>$"),
    ):
        escaped = escaped.replace(sign, command)
    return escaped


def latex_table(comparison: Comparison) -> str:
    """booktabs table, best of each column bold, second underlined; the notes follow as comments."""
    heads = [*_head(comparison), *further_columns(comparison)]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{tabular}{l" + "r" * (len(heads) - 1) + "}",
        "\\toprule",
        _latex_row([escape_latex(head) for head in heads]),
        "\\midrule",
    ]
    cells = accuracy_cells(comparison)
    for _, row in comparison.methods.iterrows():
        texts = [_latex_cell(cells[row["label"]][target]) for target in (*comparison.targets, "average")]
        further = [_latex_number(text) for text in further_cells(comparison, row)]
        lines.append(_latex_row([escape_latex(shown_label(row)), *texts, *further]))
    published = published_cells(comparison)
    if published:
        lines.append("\\midrule")
    for label, source, values in published:
        texts = [_latex_cell(values.get(target, Cell(MISSING))) for target in (*comparison.targets, "average")]
        empty = [""] * len(further_columns(comparison))
        lines.append(_latex_row([escape_latex(f"{label} ({source}, published)"), *texts, *empty]))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in comparison.notes)]) + "\n"


def _latex_number(text: str) -> str:
    """A text that may begin with a minus, which TeX sets as one only in mathematics."""
    return f"$-${text[1:]}" if text.startswith("-") else escape_latex(text)


def _latex_cell(cell: Cell) -> str:
    mean = {0: "{}", 1: "\\textbf{{{}}}", 2: "\\underline{{{}}}"}[cell.place].format(escape_latex(cell.mean))
    return f"{mean} $\\pm$ {cell.std}" if cell.std else mean


def _latex_row(texts: list[str]) -> str:
    return " & ".join(texts) + " \\\\"


FORMATS = {"table": table_text, "csv": csv_table, "markdown": markdown_table, "latex": latex_table}
