"""The methods of each group, from a file: the table imports PyTorch, which takes longer than to print all names.

`python -m fedsim.methods.groups` writes the file again; a test compares it with the table.
"""

import csv
from pathlib import Path

FILE = Path(__file__).with_name("groups.csv")


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


if __name__ == "__main__":
    FILE.write_text(table_text())
