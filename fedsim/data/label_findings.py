"""Names of classes and domains that are not what they look like: two that look alike, empty cells written as text,
several labels in one, numbers that are measured and not named.

    label_findings({"cat": 20, "cat\N{ZERO WIDTH SPACE}": 1}, "mine.csv", "label")   ->  one finding, hidden-signs
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedsim.data.findings import Finding, joined_names
from fedsim.data.names import plain

if TYPE_CHECKING:
    import pandas as pd

SEPARATORS = "|;,+&"  # that stand between the labels of one image
MEASURED = 10  # different numbers from which labels may be measured values
FEW_ROWS = 3  # for each number, below which whole numbers look measured
# Texts that pandas reads as an empty cell, besides an empty text.
READ_AS_EMPTY = {
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
    "NaN", "None", "n/a", "nan", "null",
}  # fmt: skip
Counts = Mapping[str, int]  # rows by name
FirstRow = Callable[[str], int]  # the number of the first row with a name; 0 where rows have no numbers


def label_findings(counts: Counts, where: object, column: str, first_row: FirstRow = lambda name: 0) -> list[Finding]:
    """The findings in the labels of a column: in the names themselves, and in what they say together."""
    place = f"{where}, column {column!r}"
    return [
        *name_findings(counts, where, column, first_row),
        *_several(counts, place),
        *_measured(counts, place),
        *_below_zero(counts, place, first_row),
    ]


def name_findings(counts: Counts, where: object, column: str, first_row: FirstRow = lambda name: 0) -> list[Finding]:
    """The findings in single names of a column, of classes or of domains. counts: rows by name"""
    place = f"{where}, column {column!r}"
    return [
        *_hidden(counts, place, first_row),
        *_spelling(counts, place),
        *_number_forms(counts, place, first_row),
        *_missing(counts, place, first_row),
    ]


def _rows(count: int) -> str:
    """A number of rows with its verb: '1 row has', '2 rows have'."""
    return "1 row has" if count == 1 else f"{count:,} rows have"


def _row(name: str, first_row: FirstRow) -> str:
    """Where a name occurs first, in words: ', first in row 5'."""
    number = first_row(name)
    return f", first in row {number:,}" if number else ""


def visible(name: str) -> str:
    """A name as it looks: without signs that are not shown, and with a usual blank for every other one."""
    shown = "".join(sign for sign in unicodedata.normalize("NFKC", name) if unicodedata.category(sign) != "Cf")
    return " ".join(shown.split())


def _hidden(counts: Counts, place: str, first_row: FirstRow) -> list[Finding]:
    """A grave finding for names that look alike and are two; one that has signs which are not shown is a remark."""
    alike: dict[str, list[str]] = {}
    for name in counts:
        alike.setdefault(visible(name), []).append(name)
    findings = []
    for shown, names in alike.items():
        odd = sorted((name for name in names if name != shown), key=lambda name: counts[name])
        if not odd or (len(names) == 1 and odd[0].isprintable()):
            continue
        rows = sum(counts[name] for name in odd)
        signs = sorted({unicodedata.name(sign, hex(ord(sign))) for name in odd for sign in set(name) - set(shown)})
        text = f"{place}: {_rows(rows)} {shown!r} with {', '.join(signs)}{_row(odd[0], first_row)}"
        if len(names) > 1:
            text += f", which makes {len(names)} names that look alike"
        findings.append(Finding("hidden-signs", place, rows, text, "make them equal", len(names) > 1))
    return findings


def _spelling(counts: Counts, place: str) -> list[Finding]:
    """A finding for names that differ in blanks, separators or case only, as Cat and cat; they may be meant as two."""
    alike: dict[str, list[str]] = {}
    for name in counts:
        if _number(name) is None:
            alike.setdefault(plain(visible(name)), []).append(name)
    findings = []
    for names in alike.values():
        if len({visible(name) for name in names}) > 1:
            shown = ", ".join(f"{name!r} (rows: {counts[name]:,})" for name in sorted(names))
            text = f"{place}: {shown} differ in spelling only and are {len(names)} names"
            findings.append(Finding("spelling", place, len(names), text, "if they are one, make them equal"))
    return findings


def _number_forms(counts: Counts, place: str, first_row: FirstRow) -> list[Finding]:
    """A grave finding for each number that is written in two forms, such as 0 and 0.0."""
    forms: dict[float, list[str]] = {}
    for name in counts:
        number = _number(name)
        if number is not None:
            forms.setdefault(number, []).append(name)
    findings = []
    for names in forms.values():
        if len(names) > 1:
            rare = min(names, key=lambda name: counts[name])
            shown = ", ".join(f"{name!r} (rows: {counts[name]:,})" for name in sorted(names))
            text = f"{place}: one number is written in {len(names)} forms, {shown}{_row(rare, first_row)}"
            findings.append(Finding("numbers", place, counts[rare], text, "make them equal", is_grave=True))
    return findings


def _number(name: str) -> float | None:
    """The finite number that a name is; None for other names."""
    try:
        number = float(name)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _missing(counts: Counts, place: str, first_row: FirstRow) -> list[Finding]:
    """A grave finding for each name that pandas would read as an empty cell, such as nan and N/A."""
    findings = []
    for name in counts:
        if name not in READ_AS_EMPTY:
            continue
        text = f"{place}: {_rows(counts[name])} {name!r}{_row(name, first_row)}, which means an empty cell elsewhere"
        remedy = "leave these rows out, or fill them in"
        findings.append(Finding("missing-labels", place, counts[name], text, remedy, is_grave=True))
    return findings


def _several(counts: Counts, place: str) -> list[Finding]:
    """A grave finding where labels are made of other labels, as 'edema|mass' is of 'edema' and 'mass'."""
    for separator in SEPARATORS:
        parts = {name: [part.strip() for part in name.split(separator)] for name in counts if separator in name}
        combined = {name: of_name for name, of_name in parts.items() if all(of_name)}
        composed = [name for name, of_name in combined.items() if all(part in counts for part in of_name)]
        if composed or _are_combined_anew(list(combined.values())):
            rows = sum(counts[name] for name in combined)
            shown = joined_names(sorted(composed or combined, key=lambda name: -counts[name]), 3)
            text = (
                f"{place}: {_rows(rows)} several labels in one, such as {shown}, and each combination is a class "
                "of its own"
            )
            remedy = "an image with several labels is the task 'multi-label'"
            return [Finding("multi-label", place, rows, text, remedy, is_grave=True)]
    return []


def _are_combined_anew(combined: Sequence[Sequence[str]]) -> bool:
    """Whether fewer parts than combinations occur, some of them in several places, as in A|B, B|C and A|C."""
    places: dict[str, set[int]] = {}
    for parts in combined:
        for place, part in enumerate(parts):
            places.setdefault(part, set()).add(place)
    return len(combined) >= max(len(places), 2) and any(len(of_part) > 1 for of_part in places.values())


def _measured(counts: Counts, place: str) -> list[Finding]:
    """A grave finding where labels are many different numbers, as measured values are."""
    numbers = [_number(name) for name in counts]
    rows = sum(counts.values())
    if len(numbers) < MEASURED or None in numbers:
        return []
    has_fractions = any(number % 1 for number in numbers if number is not None)
    if not has_fractions and rows >= FEW_ROWS * len(numbers):
        return []
    text = f"{place}: the labels are {len(numbers):,} different numbers in {rows:,} rows, each a class of its own"
    remedy = "a measured value is the task 'regression'; for classes, write the name of a range"
    return [Finding("continuous", place, rows, text, remedy, is_grave=True)]


def _below_zero(counts: Counts, place: str, first_row: FirstRow) -> list[Finding]:
    """A finding where one label is a negative number and the others, two at least, are numbers from 0 on."""
    numbers = {name: number for name in counts if (number := _number(name)) is not None}
    negative = [name for name, number in numbers.items() if number < 0]
    if len(negative) != 1 or len(numbers) < max(3, len(counts)):
        return []
    [name] = negative
    text = f"{place}: {_rows(counts[name])} {name!r}{_row(name, first_row)}, the only number below 0, as a class"
    remedy = "if it marks what is not known, leave these rows out"
    return [Finding("below-zero", place, counts[name], text, remedy)]


def one_hot(rows: "pd.DataFrame") -> tuple[list[str], bool]:
    """(the columns of a table that hold only 0 and 1, whether each row has exactly one 1 among them).

    There are none where fewer than two columns hold both numbers.
    """
    names = []
    for name in rows.columns:
        values = set(rows[name].astype(str).str.strip().unique())
        if values and all(_number(value) in (0, 1) for value in values) and len(values) > 1:
            names.append(str(name))
    if len(names) < 2:
        return [], False
    sums = rows[names].astype(float).sum(axis="columns")
    return names, bool((sums == 1).all())


def one_hot_hint(rows: "pd.DataFrame") -> str:
    """What to say where a table has no column of labels but columns of 0 and 1; empty where it has none."""
    names, is_one = one_hot(rows)
    if not names:
        return ""
    if is_one:
        return (
            f"; {joined_names(names)} hold 0 and 1, one 1 in a row: write the name of the column with the 1 into one "
            "column of labels"
        )
    return f"; {joined_names(names)} hold 0 and 1, several 1 in a row: this is the task 'multi-label'"


def count_names(names: Sequence[object]) -> Counts:
    """Rows by name."""
    return Counter(map(str, names))
