"""Titles and links of the papers of METHODS, from `papers.csv`, by the citation with which a row's `paper` begins."""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("papers.csv")


class Paper(NamedTuple):
    """A line of the file."""

    citation: str
    title: str
    link: str


@cache
def papers() -> tuple[Paper, ...]:
    """All lines of the file."""
    with FILE.open(encoding="utf-8", newline="") as handle:
        return tuple(Paper(**row) for row in csv.DictReader(handle))


def papers_of(text: str) -> list[Paper]:
    """The papers that a recipe names in its `paper`: none for rows of other packages, several for combinations."""
    return [paper for piece in text.split("; ") for paper in papers() if piece.startswith(paper.citation)]
