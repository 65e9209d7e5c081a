"""Reads the tables of the pages of results, so that each method's page can show its own rows."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedsim.methods.table import METHODS

FOLDER = Path(__file__).with_name("tables")
PAGES = (
    "digits",
    "pacs",
    "pacs-64",
    "segmentation",
    "rotated-mnist",
    "csac",
    "combinations",
    "why",
    "hospitals",
    "drawings",
    "speakers",
)


class Results(NamedTuple):
    """A table with a column `method`: its section's title, page and anchor, its heads, and its rows."""

    title: str
    place: str
    heads: list[str]
    rows: list[list[str]]


def methods_in(cell: str) -> set[str]:
    """The methods that a cell of the column `method` names: "gPerXAN + FedDG-GA", "CSAC without alignment"."""
    words = [re.match(r"\W*([\w-]*)", piece) for piece in cell.lower().split("+")]
    return {word[1] for word in words if word and word[1] in METHODS}


@cache
def tables() -> list[Results]:
    """All tables of methods, in the order of the pages."""
    return [table for page in PAGES for table in _tables(page)]


def results_of(method: str) -> Iterator[Results]:
    """The tables that have rows of that method, with these rows alone and FedAvg's below."""
    for table in tables():
        place = table.heads.index("method")
        own = [row for row in table.rows if method in methods_in(row[place])]
        if own:
            beside = [row for row in table.rows if methods_in(row[place]) == {"fedavg"} and row not in own]
            yield table._replace(rows=own + beside)


def digits() -> dict[str, dict[str, str]]:
    """{method: its row of the first table, by head}."""
    table = tables()[0]
    rows = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
    return {name: row for row in rows for name in methods_in(row["method"])}


def _tables(page: str) -> Iterator[Results]:
    title, number, seen, heads, rows = "", 0, [], [], []
    for line in [*(FOLDER / f"{page}.md").read_text().splitlines(), ""]:
        if line.startswith("#"):
            title, number = line.lstrip("# "), 0
            seen.append(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            heads, rows = (heads, [*rows, cells]) if heads else (cells, [])
        elif heads:
            again = seen.count(seen[-1]) - 1  # Sphinx numbers equal anchors
            if "method" in heads:
                number += 1
                yield Results(
                    title + (f", table {number}" if number > 1 else ""),
                    f"tables/{page}.md#{seen[-1]}" + (f"-{again}" if again else ""),
                    heads,
                    rows[1:],
                )
            heads, rows = [], []
