"""What the methods of other benchmarks are called here, or why they are not here.

The names are those of the tables of FedDG_Benchmark (its README) and MarsFL (its README and the servers in its code),
and of DomainBed's list of algorithms. Files of MarsFL's code for its authors' trials are left out.
"""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("elsewhere.csv")
LISTS = {
    "FedDG_Benchmark": "https://github.com/inouye-lab/FedDG_Benchmark",
    "MarsFL": "https://github.com/WenkeHuang/MarsFL",
    "DomainBed": "https://github.com/facebookresearch/DomainBed",
}


class Elsewhere(NamedTuple):
    """A name of other benchmarks.

    lists: the benchmarks that have the name, joined by spaces
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
    with FILE.open(encoding="utf-8", newline="") as handle:
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
