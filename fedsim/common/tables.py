"""Tables: one set of columns, rows and notes, written for the terminal and as Markdown, LaTeX, HTML and CSV.

Whoever makes a table gives plain texts. They are escaped here for each form, and lose their control characters here.

    Table([LABEL, Column("photo")], [Row(["fedavg", Cell("87.5", spread="1.2", place=1)])], title="pacs").markdown()
"""

import csv
import io
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rich import markup, table
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from fedsim.common.console import Terminal
from fedsim.common.errors import printable

if TYPE_CHECKING:
    from markupsafe import Markup

MISSING = "\N{EN DASH}"
INDENT = "  "  # of a row of details
WIDEST = 10_000  # letters of a line, more than any table has
BETWEEN = 3  # letters of a line and two blanks, which each column has besides its text
PLACES = {0: "", 1: "bold green", 2: "underline"}  # rich's styles of the first and the second place of a column
ROWS = {"": "", "published": "dim italic", "detail": "dim"}  # rich's styles of the kinds of rows
LATEX = str.maketrans(
    {
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
        MISSING: "--",
        "±": r"$\pm$",
        "Δ": r"$\Delta$",
        "†": r"$^\dagger$",
        "‡": r"$^\ddagger$",
        "<": "$<$",
        ">": "$>$",
    }
)


@dataclass(frozen=True)
class Cell:
    """One cell: a text, which a spread may follow as in `87.5 ± 1.2`.

    place: 1 or 2 for the best and the second of a column, whose text is marked; 0 for all others
    value: the number by which an HTML page sorts and filters; NaN comes last, and without one the text counts
    link: where the text leads in HTML
    """

    text: str
    spread: str = ""
    place: int = 0
    value: float | None = None
    link: str = ""

    @property
    def plain(self) -> str:
        """The text with its spread."""
        return f"{self.text} ± {self.spread}" if self.spread else self.text

    @property
    def order(self) -> str:
        """The value as HTML has it; empty for NaN."""
        return "" if self.value is None or math.isnan(self.value) else f"{self.value:.10g}"


@dataclass(frozen=True)
class Column:
    """A column.

    folds: a cell that is too long for the terminal goes on in the next line; otherwise its end is cut off
    style: the class of its cells in HTML: `long` for sentences, `words` for names of several words
    """

    heading: str
    align: Literal["left", "right"] = "right"
    folds: bool = False
    style: str = ""


@dataclass(frozen=True)
class Row:
    """A row; a cell that is only text may be a str.

    kind: `published` for numbers from elsewhere, which stand below in HTML; `detail` for a row that belongs to the one
        above, and is indented
    is_apart: whether a line separates it from the row above
    """

    cells: Sequence[Cell | str]
    kind: Literal["", "published", "detail"] = ""
    is_apart: bool = False

    @property
    def full_cells(self) -> list[Cell]:
        """All cells as `Cell`."""
        return [cell if isinstance(cell, Cell) else Cell(cell) for cell in self.cells]


LABEL = Column("Method", "left")


@dataclass(frozen=True)
class Table:
    """Columns, rows, a title and notes.

    subtitle: follows the title on the terminal and in LaTeX
    records: the same numbers in full precision, which `csv` writes
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    subtitle: str = ""
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = ()

    def part(self, places: Iterable[int], title: str = "", subtitle: str = "") -> "Table":
        """A table of these columns with a title of its own, without notes.

        Rows that have nothing besides their first cell are left out.
        """
        places = list(places)
        rows = []
        for row in self.rows:
            cells = [row.full_cells[place] for place in places]
            if any(cell.text for cell in cells[1:]):
                rows.append(replace(row, cells=cells))
        return Table([self.columns[place] for place in places], rows, title, subtitle)

    def rich(self) -> table.Table:
        """The table for the terminal, without its notes."""
        columns = [
            table.Column(
                markup.escape(column.heading), justify=column.align, overflow="fold" if column.folds else "ellipsis"
            )
            for column in self.columns
        ]
        title = "\n".join(filter(None, (self.title, self.subtitle)))
        shown = table.Table(*columns, title=markup.escape(title) or None, title_justify="left")
        for number, row in enumerate(self.rows):
            if number and row.is_apart:
                shown.add_section()
            name, *others = row.full_cells
            indent = INDENT if row.kind == "detail" else ""
            cells = [Text(cell.plain, PLACES[cell.place]) for cell in others]
            shown.add_row(Text(indent + name.plain), *cells, style=ROWS[row.kind])
        return shown

    def parts(self, width: int) -> list["Table"]:
        """The table in as few parts as fit into so many letters; each begins with the first column.

        A table with a column that folds stays whole, because its cells go on in the next line.
        """
        if any(column.folds for column in self.columns):
            return [self]
        fewest = self._places(width)
        if len(fewest) == 1:
            return [self]
        narrowest = width
        while len(self._places(narrowest - 1)) == len(fewest) and narrowest > 1:
            narrowest -= 1
        first, *others = self._places(narrowest)
        parts = [self.part(first, self.title, self.subtitle)]
        further = f"{self.title} (continued)" if self.title else ""
        for places in others:
            parts.append(self.part(places, further))
        return parts

    def _places(self, width: int) -> list[list[int]]:
        """The numbers of the columns of each part, where no part is wider than so many letters or has two columns."""
        widths = self._widths()
        parts: list[list[int]] = []
        free = 0
        for place in range(1, len(widths)):
            if not parts or widths[place] > free:
                parts.append([0])
                free = width - 1 - widths[0]
            parts[-1].append(place)
            free -= widths[place]
        return parts or [[0]]

    def _widths(self) -> list[int]:
        """The letters that each column needs on the terminal."""
        widths = [cell_len(column.heading) for column in self.columns]
        for row in self.rows:
            for place, cell in enumerate(row.full_cells):
                letters = cell_len(cell.plain)
                if row.kind == "detail" and place == 0:
                    letters += len(INDENT)
                widths[place] = max(widths[place], letters)
        return [letters + BETWEEN for letters in widths]

    def show(self, console: Console | None = None) -> None:
        """Print the table and its notes."""
        show_tables([self], self.notes, console)

    def text(self) -> str:
        """What `show` prints, as plain text that is never wrapped."""
        return tables_text([self], self.notes)

    def markdown(self) -> str:
        """GitHub Markdown with the best of each column bold; texts are escaped, so that they are shown as written."""
        heads = [escape_markdown(column.heading) for column in self.columns]
        rules = ["---:" if column.align == "right" else "---" for column in self.columns]
        lines = [f"**{escape_markdown(self.title)}**", ""] if self.title else []
        lines += [_markdown_row(heads), f"|{'|'.join(rules)}|"]
        for row in self.rows:
            name, *others = row.full_cells
            label = escape_markdown(name.plain)
            cells = [f"_{label}_" if row.kind else label, *map(_markdown_cell, others)]
            lines.append(_markdown_row(cells))
        notes = [f"- {escape_markdown(note)}" for note in self.notes]
        return printable("\n".join([*lines, "", *notes]) + "\n")

    def latex(self, has_lines: bool = True, shows_title: bool = False) -> str:
        """A booktabs table with the best of each column bold and the second underlined.

        The title and the notes are comments above and below it.
        has_lines: whether rows that are apart have a line above them
        shows_title: whether the title is in the table, too
        """
        title = " ".join("; ".join(filter(None, (self.title, self.subtitle))).splitlines())
        aligned = "".join(column.align[0] for column in self.columns)
        lines = [f"% {title}", f"\\begin{{tabular}}{{{aligned}}}", "\\toprule"]
        if shows_title:
            lines.append(f"\\multicolumn{{{len(self.columns)}}}{{l}}{{{escape_latex(title)}}} \\\\")
        lines += [_latex_row(escape_latex(column.heading) for column in self.columns), "\\midrule"]
        for number, row in enumerate(self.rows):
            if number and row.is_apart and has_lines:
                lines.append("\\midrule")
            name, *others = row.full_cells
            indent = "\\quad " if row.kind == "detail" else ""
            lines.append(_latex_row([indent + escape_latex(name.plain), *map(_latex_cell, others)]))
        notes = [f"% {line}" for note in self.notes for line in note.splitlines()]
        return printable("\n".join([*lines, "\\bottomrule", "\\end{tabular}", *notes]) + "\n")

    def html(self, style: str = "") -> "Markup":
        """A table that is sorted and filtered by its heads, and the notes; `published` rows come last, never sorted.

        style: more classes of the table
        """
        from fedsim.common.templates import fill

        rows: dict[bool, list[list[tuple[Cell, str]]]] = {False: [], True: []}
        for row in self.rows:
            cells = row.full_cells
            styles = [_html_style(cell, column) for cell, column in zip(cells, self.columns, strict=True)]
            rows[row.kind == "published"].append(list(zip(cells, styles)))
        return fill(
            "common/table.html",
            columns=self.columns,
            rows=rows[False],
            below=rows[True],
            notes=self.notes,
            style=f"sortable {style}".strip(),
        )

    def csv(self) -> str:
        """The records as CSV: a column for each key, empty cells for NaN and None."""
        import pandas as pd  # takes half a second, and most tables are printed without it

        header = dict.fromkeys(key for record in self.records for key in record)
        missing = [{key for key, value in record.items() if pd.isna(value)} for record in self.records]
        rows = [{**record, **dict.fromkeys(keys)} for record, keys in zip(self.records, missing)]
        return csv_text(header, rows)


def show_tables(tables: Sequence[Table], notes: Iterable[str], console: Console | None = None) -> None:
    """Print tables, one under the other, then the notes.

    A table that is wider than the terminal, or than the variable COLUMNS says, is printed in parts. Other output that
    does not go to a terminal is as wide as needed, so that no cell and no note is broken into lines.
    """
    console = console or Terminal()
    has_width = console.is_terminal or (console.file is sys.stdout and "COLUMNS" in os.environ)
    if has_width:
        tables = [part for each in tables for part in each.parts(console.width)]
    shown = [each.rich() for each in tables]
    options = console.options.update(max_width=WIDEST)
    needed = max(Measurement.get(console, options, each).maximum for each in shown)
    if not has_width:
        console.width = max(console.width, needed)
    for each in shown:
        console.print(each)
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False, soft_wrap=not has_width)


def tables_text(tables: Sequence[Table], notes: Iterable[str]) -> str:
    """What `show_tables` prints, as plain text that is never wrapped."""
    buffer = io.StringIO()
    show_tables(tables, notes, Terminal(file=buffer, width=100, color_system=None))
    return buffer.getvalue()


def percent(value: float) -> str:
    """A fraction as percent with one decimal, or a dash for NaN."""
    return MISSING if math.isnan(value) else f"{100 * value:.1f}"


def escape_markdown(text: str) -> str:
    """Text that GitHub shows as written, without emphasis, code, links, HTML, mathematics or table lines.

    An underscore inside a word (`art_painting`) means no emphasis and is not escaped.
    """
    one_line = " ".join(text.splitlines())
    escaped = re.sub(r"([\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", one_line)
    return re.sub(r"^([#+-])", r"\\\1", escaped) if re.match(r"[#+-]\s", escaped) else escaped


def escape_latex(text: str) -> str:
    """Text with TeX's special characters escaped, and with Greek and typographic characters as commands."""
    return text.translate(LATEX)


def csv_text(header: Iterable[str], rows: Iterable[Mapping[str, Any]], with_header: bool = True) -> str:
    """Rows as CSV lines in the header's order, without control characters; a key that a row lacks is an empty cell.

    Floats are written by `repr`, the shortest text that is read as the same number.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    header = list(header)
    if with_header:
        writer.writerow(header)
    writer.writerows([_csv_value(row.get(column)) for column in header] for row in rows)
    return printable(buffer.getvalue())


def _csv_value(value: Any) -> Any:
    """A value for csv's writer, which writes floats by `repr` and None as an empty cell; text becomes one line.

    NumPy and torch scalars become Python's numbers.
    """
    if hasattr(value, "item"):
        value = value.item()
    return " ".join(value.splitlines()) if isinstance(value, str) else value


def _markdown_row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _markdown_cell(cell: Cell) -> str:
    text = escape_markdown(cell.text)
    marked = f"**{text}**" if cell.place == 1 else text
    return f"{marked} ± {cell.spread}" if cell.spread else marked


def _latex_row(texts: Iterable[str]) -> str:
    return f"{' & '.join(texts)} \\\\"


def _latex_cell(cell: Cell) -> str:
    """A cell of numbers. TeX prints a leading minus correctly only in mathematics mode."""
    text = f"$-${escape_latex(cell.text[1:])}" if cell.text.startswith("-") else escape_latex(cell.text)
    marked = {0: text, 1: f"\\textbf{{{text}}}", 2: f"\\underline{{{text}}}"}[cell.place]
    return f"{marked} $\\pm$ {cell.spread}" if cell.spread else marked


def _html_style(cell: Cell, column: Column) -> str:
    return {0: column.style, 1: "first", 2: "second"}[cell.place]
