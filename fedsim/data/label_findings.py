"""Names of classes and domains that are not what they look like: two that look alike, empty cells written as text,
several labels in one, numbers that are measured and not named.

    label_findings({"cat": 20, "cat\N{ZERO WIDTH SPACE}": 1}, "mine.csv", "label")   ->  one finding, hidden-signs
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedsim.data.findings import Finding, joined_names
from fedsim.data.names import plain
from fedsim.data.text_table import number_of

if TYPE_CHECKING:
    import pandas as pd

SEPARATORS = "|;,+&"  # that stand between the labels of one image
MEASURED = 10  # different numbers from which labels may be measured values
GRADES = range(3, 8)  # so many classes that are numbers from 0 on may be grades
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
        *spelling_findings(counts, place),
        *number_findings(counts, place, first_row),
        *_missing(counts, place, first_row),
    ]


def _rows(count: int) -> str:
    """A number of rows with its verb: '1 row has', '2 rows have'."""
    return "1 row has" if count == 1 else f"{count:,} rows have"


def _row(name: str, first_row: FirstRow) -> str:
    """Where a name occurs first, in words: ', first in row 5'."""
    number = first_row(name)
    return f", first in row {number:,}" if number else ""


def _with_rows(counts: Counts, names: Sequence[str]) -> str:
    """Names in order with their rows, in words: "'Cat' (rows: 1), 'cat' (rows: 20)"."""
    return ", ".join(f"{name!r} (rows: {counts[name]:,})" for name in sorted(names))


def visible(name: str) -> str:
    """A name as it looks: without signs that are not shown, and with a usual blank for every other one."""
    signs = unicodedata.normalize("NFKC", name)
    shown = "".join(sign for sign in signs if unicodedata.category(sign) != "Cf")
    return " ".join(shown.split())


def _hidden_signs(shown: str, names: Iterable[str]) -> list[str]:
    """The sorted Unicode names of the signs that names have and what is shown of them has not."""
    signs = set[str]().union(*names) - set(shown)
    return sorted(unicodedata.name(sign, hex(ord(sign))) for sign in signs)


def _hidden(counts: Counts, place: str, first_row: FirstRow) -> list[Finding]:
    """A grave finding for names that look alike and are two; one that has signs which are not shown is a remark."""
    alike: dict[str, list[str]] = {}
    for name in counts:
        alike.setdefault(visible(name), []).append(name)
    findings = []
    for shown, names in alike.items():
        odd = [name for name in names if name != shown]
        odd.sort(key=lambda name: counts[name])
        are_several = len(names) > 1
        if not odd or (not are_several and odd[0].isprintable()):
            continue
        rows = sum(counts[name] for name in odd)
        signs = ", ".join(_hidden_signs(shown, odd))
        text = f"{place}: {_rows(rows)} {shown!r} with {signs}{_row(odd[0], first_row)}"
        if are_several:
            text += f", which makes {len(names)} names that look alike"
        finding = Finding(
            kind="hidden-signs",
            where=place,
            count=rows,
            text=text,
            remedy="make them equal",
            is_grave=are_several,
        )
        findings.append(finding)
    return findings


def spelling_findings(counts: Counts, place: str) -> list[Finding]:
    """A finding for names that differ in blanks, separators or case only, as Cat and cat; they may be meant as two."""
    alike: dict[str, list[str]] = {}
    for name in counts:
        if _number(name) is None:
            alike.setdefault(plain(visible(name)), []).append(name)
    findings = []
    for names in alike.values():
        shown = set(map(visible, names))
        if len(shown) < 2:
            continue
        text = f"{_with_rows(counts, names)} differ in spelling only and are {len(names)} names"
        finding = Finding(
            kind="spelling",
            where=place,
            count=len(names),
            text=f"{place}: {text}",
            remedy="if they are one, make them equal",
        )
        findings.append(finding)
    return findings


def number_findings(counts: Counts, place: str, first_row: FirstRow = lambda name: 0) -> list[Finding]:
    """A grave finding for each number that is written in two forms, such as 0 and 0.0."""
    forms: dict[float, list[str]] = {}
    for name in counts:
        number = _number(name)
        if number is not None:
            forms.setdefault(number, []).append(name)
    findings = []
    for names in forms.values():
        if len(names) < 2:
            continue
        rare = min(names, key=lambda name: counts[name] or math.inf)
        shown = f"{_with_rows(counts, names)}{_row(rare, first_row)}"
        finding = Finding(
            kind="numbers",
            where=place,
            count=counts[rare],
            text=f"{place}: one number is written in {len(names)} forms, {shown}",
            remedy="make them equal",
            is_grave=True,
        )
        findings.append(finding)
    return findings


def _number(name: str) -> float | None:
    """The finite number that a name is; None for other names."""
    number = number_of(name)
    return number if abs(number) < float("inf") else None


def _missing(counts: Counts, place: str, first_row: FirstRow) -> list[Finding]:
    """A grave finding for each name that pandas would read as an empty cell, such as nan and N/A."""
    findings = []
    for name in counts:
        if name not in READ_AS_EMPTY:
            continue
        rows = f"{_rows(counts[name])} {name!r}{_row(name, first_row)}"
        finding = Finding(
            kind="missing-labels",
            where=place,
            count=counts[name],
            text=f"{place}: {rows}, which means an empty cell elsewhere",
            remedy="leave these rows out, or fill them in",
            is_grave=True,
        )
        findings.append(finding)
    return findings


def _several(counts: Counts, place: str) -> list[Finding]:
    """A grave finding where labels are made of other labels, as 'edema|mass' is of 'edema' and 'mass'."""
    for separator in SEPARATORS:
        combined: dict[str, list[str]] = {}
        for name in counts:
            labels = [label.strip() for label in name.split(separator)]
            if len(labels) > 1 and all(labels):
                combined[name] = labels
        of_others = [name for name, labels in combined.items() if set(labels) <= counts.keys()]
        if not of_others and not _are_combined_anew(list(combined.values())):
            continue
        rows = sum(counts[name] for name in combined)
        frequent = sorted(of_others or combined, key=lambda name: -counts[name])
        examples = f"{_rows(rows)} several labels in one, such as {joined_names(frequent, 3)}"
        finding = Finding(
            kind="multi-label",
            where=place,
            count=rows,
            text=f"{place}: {examples}, and each combination is a class of its own",
            remedy="an image with several labels is the task 'multi-label'",
            is_grave=True,
        )
        return [finding]
    return []


def _are_combined_anew(combined: Sequence[Sequence[str]]) -> bool:
    """Whether fewer parts than combinations occur, some of them in several places, as in A|B, B|C and A|C."""
    places: dict[str, set[int]] = {}
    for parts in combined:
        for place, part in enumerate(parts):
            places.setdefault(part, set()).add(place)
    if len(combined) < max(len(places), 2):
        return False
    return any(len(of_part) > 1 for of_part in places.values())


def _measured(counts: Counts, place: str) -> list[Finding]:
    """A grave finding where labels are many different numbers, as measured values are."""
    numbers = [_number(name) for name in counts]
    rows = sum(counts.values())
    if len(numbers) < MEASURED or None in numbers:
        return []
    has_fractions = any(number % 1 for number in numbers if number is not None)
    if not has_fractions and rows >= FEW_ROWS * len(numbers):
        return []
    finding = Finding(
        kind="continuous",
        where=place,
        count=rows,
        text=f"{place}: the labels are {len(numbers):,} different numbers in {rows:,} rows, each a class of its own",
        remedy="a measured value is the task 'regression'; for classes, write the name of a range",
        is_grave=True,
    )
    return [finding]


def _below_zero(counts: Counts, place: str, first_row: FirstRow) -> list[Finding]:
    """A finding where one label is a negative number and the others, two at least, are numbers from 0 on."""
    numbers = [_number(name) for name in counts]
    if len(numbers) < 3 or None in numbers:
        return []
    negative = [name for name in counts if float(name) < 0]
    if len(negative) != 1:
        return []
    [name] = negative
    rows = f"{_rows(counts[name])} {name!r}{_row(name, first_row)}"
    finding = Finding(
        kind="below-zero",
        where=place,
        count=counts[name],
        text=f"{place}: {rows}, the only number below 0, as a class",
        remedy="if it marks what is not known, leave these rows out",
    )
    return [finding]


def class_findings(counts: Mapping[str, Counts], place: str) -> list[Finding]:
    """The findings in the classes of a table's rows, which are no reason to refuse it. counts: of each domain

    They are domains that lack a class which others have, and labels that are the numbers 0, 1, 2 and so on.
    """
    classes: set[str] = set()
    for of_domain in counts.values():
        classes.update(name for name, count in of_domain.items() if count)
    ordered = sorted(classes, key=lambda name: (len(name), name))
    findings = []
    for domain, of_domain in counts.items():
        absent = [name for name in ordered if not of_domain.get(name)]
        if not absent:
            continue
        finding = Finding(
            kind="absent-classes",
            where=domain,
            count=len(absent),
            text=f"{domain}: no row has the class {joined_names(absent, 10)}, which other domains have",
            remedy="a domain can neither teach nor test a class that it lacks",
        )
        findings.append(finding)
    numbers = [str(number) for number in range(len(ordered))]
    if ordered == numbers and len(numbers) in GRADES:
        finding = Finding(
            kind="grades",
            where=place,
            count=len(numbers),
            text=f"{place}: the classes are the numbers 0 to {numbers[-1]}, perhaps grades, of which each is a class",
            remedy="where only some against all others count, write a column with two names of classes",
        )
        findings.append(finding)
    return findings


def one_hot(rows: "pd.DataFrame") -> tuple[list[str], bool]:
    """(the columns of a table that hold only 0 and 1, whether each row has exactly one 1 among them).

    There are none where fewer than two columns hold both numbers.
    """
    names = []
    for name in rows.columns:
        texts = rows[name].astype(str).str.strip()
        values = set(texts.unique())
        if len(values) > 1 and all(_number(value) in (0, 1) for value in values):
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
    columns = f"{joined_names(names)} hold 0 and 1"
    if is_one:
        remedy = "write the name of the column with the 1 into one column of labels"
        return f"; {columns}, one 1 in a row: {remedy}"
    return f"; {columns}, several 1 in a row: this is the task 'multi-label'"


def count_names(names: Sequence[object]) -> Counts:
    """Rows by name."""
    return Counter(map(str, names))
