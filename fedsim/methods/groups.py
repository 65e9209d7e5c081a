"""What files say of methods: groups, ideas in plain words, papers, and the names that other benchmarks have.

The names of `elsewhere.csv` are those of the tables of FedDG_Benchmark (its README) and MarsFL (its README and the
servers in its code), and of DomainBed's list of algorithms. Files of MarsFL's authors' trials are left out.

The table imports PyTorch, which takes longer than to print all names. `python -m fedsim.methods.listing` writes the
groups again; a test compares them with the table.
"""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("groups.csv")
IDEAS = Path(__file__).with_name("ideas.csv")
PAPERS = Path(__file__).with_name("papers.csv")
ELSEWHERE = Path(__file__).with_name("elsewhere.csv")
LISTS = {
    "FedDG_Benchmark": "https://github.com/inouye-lab/FedDG_Benchmark",
    "MarsFL": "https://github.com/WenkeHuang/MarsFL",
    "DomainBed": "https://github.com/facebookresearch/DomainBed",
}


def groups() -> dict[str, list[str]]:
    """{group: its methods}, in the order of the list."""
    groups: dict[str, list[str]] = {}
    for row in csv.DictReader(FILE.read_text().splitlines()):
        groups.setdefault(row["group"], []).append(row["method"])
    return groups


class Idea(NamedTuple):
    """A line of the file of ideas: a row of METHODS, its name as papers print it, and a short sentence."""

    method: str
    printed: str
    idea: str


@cache
def _ideas() -> dict[str, Idea]:
    """{method: its line}, for the rows of METHODS."""
    with IDEAS.open(encoding="utf-8", newline="") as handle:
        return {row["method"]: Idea(**row) for row in csv.DictReader(handle)}


def ideas() -> dict[str, str]:
    """{method: what it does, in one sentence of at most 20 plain words}, for the rows of METHODS."""
    return {method: line.idea for method, line in _ideas().items()}


def printed_name(name: str) -> str:
    """A method's name as papers print it; rows of other packages keep their name.

    >>> printed_name("gperxan+feddg-ga")
    'gPerXAN + FedDG-GA'
    """
    rows = [_ideas()[row].printed if row in _ideas() else row for row in name.split("+")]
    return " + ".join(rows)


def titled(name: str) -> str:
    """A method's name with its printed name in brackets where both differ.

    >>> titled("gperxan"), titled("mixup")
    ('gperxan (gPerXAN)', 'mixup')
    """
    printed = printed_name(name)
    return name if printed == name else f"{name} ({printed})"


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


class Elsewhere(NamedTuple):
    """A name of other benchmarks.

    lists: the benchmarks that have the name, joined by spaces; empty: a method that is missing here, and is in none
    here: our methods for it, each as the command line takes it, joined by commas; empty where there is none
    answer: why there is none, or which of several methods is meant
    """

    name: str
    lists: str
    here: str
    answer: str

    @property
    def line(self) -> str:
        """The answer as a part of one line, for example `here it is vrex`."""
        if not self.here:
            return self.answer
        methods = self.here.replace(", ", " or ")
        note = f" ({self.answer})" if self.answer else ""
        return f"here it is {methods}{note}"


@cache
def elsewhere() -> tuple[Elsewhere, ...]:
    """All names of the file, in its order."""
    with ELSEWHERE.open(encoding="utf-8", newline="") as handle:
        return tuple(Elsewhere(**row) for row in csv.DictReader(handle))


def answer_for(name: str, methods: list[str]) -> str:
    """What is to be said of a name that is none of `methods`; empty where nothing is known of it.

    Case, hyphens, underscores and blanks do not count: `fedDG-GA` and `FedDG_GA` are written feddg-ga here.
    """
    for entry in elsewhere():
        if _letters(entry.name) == _letters(name):
            return entry.line
    for method in methods:
        if _letters(method) == _letters(name):
            return f"here it is written {method}"
    return ""


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


def elsewhere_table() -> str:
    """The names of all lists as a table in Markdown, a row for each name."""
    lines = ["| name | in | here |", "|---|---|---|"]
    for name, lists, here, answer in elsewhere():
        lines.append(f"| {name} | {', '.join(lists.split())} | {_cell(here, answer)} |")
    return "\n".join([*lines, ""])


def _cell(here: str, answer: str) -> str:
    methods = " or ".join(f"`{method}`" for method in here.split(", ") if method)
    note = f" ({answer})" if methods and answer else answer
    return f"{methods}{note}"
