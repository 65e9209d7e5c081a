"""Pieces of HTML: escaped tables, pictures, the page around them. The page contains its styles, scripts and data.

The charts are Plotly's and the tables DataTables', because hover, isolation, sorting and filters are then theirs, and
both scripts ship inside pure Python packages. They are packed by gzip: 1.9 MB in place of 5.5.
"""

import base64
import gzip
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from fedsim.common.errors import printable

HERE = Path(__file__).parent
PIXELS_PER_INCH = 120
# The browser refuses to load anything that is not in the file.
POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class Data:
    """One cell of a table: its text, the number by which it is sorted and filtered, its style class, and a link.

    Without a number the cell is sorted by its text; NaN comes last.
    """

    text: str
    value: float | None = None
    style: str = ""
    link: str = ""

    def html(self) -> str:
        """The cell's markup."""
        value = ""
        if self.value is not None:
            number = "" if math.isnan(self.value) else f"{self.value:.10g}"
            value = f' data-order="{number}" data-search="{number}"'
        style = f' class="{self.style}"' if self.style else ""
        text = f'<a href="{escape(self.link)}">{escape(self.text)}</a>' if self.link else escape(self.text)
        return f"<td{value}{style}>{text}</td>"


Cells = Sequence[Data | str]


def table(heads: Sequence[str], rows: Iterable[Cells], below: Iterable[Cells] = (), style: str = "") -> str:
    """Table that is sorted and filtered by its heads; the rows `below` always come last and are never sorted."""
    lines = [list(row) for row in rows]
    head = "".join(_head(name, [row[column] for row in lines]) for column, name in enumerate(heads))
    bodies = f"<tbody>{_rows(lines)}</tbody>"
    published = _rows(below)
    if published:
        bodies += f'<tbody class="published">{published}</tbody>'
    kind = f"sortable {style}".strip()
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>{bodies}</table></div>'


def _head(name: str, column: Cells) -> str:
    """The heading of a column, aligned like the cells of the column."""
    long = any(isinstance(cell, Data) and cell.style == "long" for cell in column)
    style = ' class="long"' if long else ""
    return f'<th scope="col"{style}>{escape(name)}</th>'


def _rows(rows: Iterable[Cells]) -> str:
    cells = (((cell if isinstance(cell, Data) else Data(cell)).html() for cell in row) for row in rows)
    return "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)


def key_values(settings: Mapping[str, object], heads: Sequence[str] = ("setting", "value")) -> str:
    """Two-column table of names and values."""
    return table(heads, ([key, str(value)] for key, value in settings.items()), style="text")


def picture(content: bytes, caption: str, inches: float, kind: str = "svg+xml") -> str:
    """Figure with an SVG (or `png`) as data URI; the caption is also the alternative text.

    inches: the width of the figure. Even on a wide screen it is not shown larger.
    """
    data = base64.b64encode(content).decode()
    width = f"width:{round(PIXELS_PER_INCH * inches)}px"
    return (
        f'<figure><div><img alt="{escape(caption)}" style="{width}" src="data:image/{kind};base64,{data}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def bullets(notes: Iterable[str]) -> str:
    """Remarks below a table."""
    return '<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"


def folded(title: str, content: str, is_open: bool = False) -> str:
    """Content that is hidden below a title until the reader clicks it."""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{content}</details>"


def packed(name: str, text: str) -> str:
    """A text that `unpack` of report.js reads again."""
    content = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{content}</script>'


def libraries() -> dict[str, str]:
    """The scripts and the styles of Plotly and DataTables, from the packages that ship them."""
    plotly, tables = distribution("plotly"), distribution("itables")

    def text(package: Any, file: str) -> str:
        return Path(package.locate_file(file)).read_text(encoding="utf-8")

    module = text(tables, "itables/html/dt_bundle.js")
    exported = re.search(r"export\s*\{.*?\b(\w+) as default\b.*?\};?", module)
    assert exported is not None
    # As a module it could not be unpacked at run time without a request, which the page's policy refuses.
    script = f"(() => {{{module.replace(exported[0], f'window.DataTable = {exported[1]};')}}})();"
    return {
        "plotly": text(plotly, "plotly/package_data/plotly.min.js"),
        "datatables": script,
        "datatables-css": text(tables, "itables/html/dt_bundle.css"),
    }


def _printable(value: Any) -> Any:
    """A value for JSON with printable texts. JSON writes control characters as escapes, which the page would undo."""
    if isinstance(value, Mapping):
        return {_printable(key): _printable(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(own) for own in value]
    return printable(value) if isinstance(value, str) else value


def page(title: str, content: str, data: Mapping[str, Any], live: bool = False) -> str:
    """The whole document. data: what report.js draws. live: it may ask the server that it comes from."""
    css, js = ((HERE / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    packs = {**libraries(), "data": json.dumps(_printable(data), ensure_ascii=False, allow_nan=False)}
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}{"; connect-src 'self'" if live else ""}">
<title>{escape(printable(title))}</title>
<style>
{css}</style>
</head>
<body>
{printable(content)}
<dialog id="run"></dialog>
{chr(10).join(packed(name, text) for name, text in packs.items())}
<script type="module">
{js}</script>
</body>
</html>
"""
