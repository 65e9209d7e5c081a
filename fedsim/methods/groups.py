"""What files say of methods: the group of each, its idea in plain words, and the titles and links of papers.

The table imports PyTorch, which takes longer than to print all names. `python -m fedsim.methods.groups` writes the
groups again; a test compares them with the table.
"""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("groups.csv")
IDEAS = Path(__file__).with_name("ideas.csv")
PAPERS = Path(__file__).with_name("papers.csv")


def groups() -> dict[str, list[str]]:
    """{group: its methods}, in the order of the list."""
    groups: dict[str, list[str]] = {}
    for row in csv.DictReader(FILE.read_text().splitlines()):
        groups.setdefault(row["group"], []).append(row["method"])
    return groups


def table_text() -> str:
    """The text of the file as it follows from METHODS, without the methods of installed packages."""
    from fedsim.methods.listing import listed
    from fedsim.methods.table import METHODS

    rows = [f"{group},{row.name}" for group, members in listed().items() for row in members if row.name in METHODS]
    return "\n".join(["group,method", *rows, ""])


@cache
def ideas() -> dict[str, str]:
    """{method: what it does, in one sentence of at most 20 plain words}, for the rows of METHODS."""
    with IDEAS.open(encoding="utf-8", newline="") as handle:
        return {row["method"]: row["idea"] for row in csv.DictReader(handle)}


def ideas_of(name: str) -> list[str]:
    """The ideas of the rows that a method's name joins by `+`; rows of other packages have none."""
    return [ideas()[row] for row in name.split("+") if row in ideas()]


class Paper(NamedTuple):
    """A line of the file of papers; `citation` is what the `paper` of a row begins with."""

    citation: str
    title: str
    link: str


@cache
def papers() -> tuple[Paper, ...]:
    """All lines of the file of papers."""
    with PAPERS.open(encoding="utf-8", newline="") as handle:
        return tuple(Paper(**row) for row in csv.DictReader(handle))


def papers_of(text: str) -> list[Paper]:
    """The papers that a recipe names in its `paper`: none for rows of other packages, several for combinations."""
    return [paper for piece in text.split("; ") for paper in papers() if piece.startswith(paper.citation)]


if __name__ == "__main__":
    FILE.write_text(table_text())
