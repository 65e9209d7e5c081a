"""The texts of a comparison's cells, which are the same in all formats: accuracies, costs, tests, published rows."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedsim.data.benchmarks import AVERAGE
from fedsim.results.compared import Compared
from fedsim.results.notes import MARKS
from fedsim.results.selection import BUDGETS

MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class CellText:
    """One accuracy as text: mean, spread (empty for one seed) and place in the column (1 or 2; 0 for all others)."""

    mean: str
    std: str = ""
    place: int = 0


def percent(value: float) -> str:
    """Fraction -> percent with one decimal, a dash for NaN."""
    return MISSING if pd.isna(value) else f"{100 * value:.1f}"


def amount(size: float) -> str:
    """Bytes in decimal units: `134.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def accuracy_cells(comparison: Compared) -> dict[str, list[CellText]]:
    """{label: its cells, in the order of `columns`}; first and second place of each column follow the printed numbers.

    Methods that use images of the target have no place, because they are ranked apart, nor do those with other seeds in
    the column than most.
    """
    texts = comparison.cells.assign(
        text=comparison.cells["mean"].map(percent), spread=comparison.cells["std"].map(percent)
    )
    ranked = by_group(comparison)[0]["label"]
    cells: dict[str, list[CellText]] = {}
    for _, column in texts.groupby("target", sort=False):
        # Places follow the printed numbers: a reader would not understand why only one of two equal texts is bold.
        shown = _of_equal_seeds(column[column["label"].isin(ranked) & (column["text"] != MISSING)])
        ordered = sorted({float(text) for text in shown["text"]}, reverse=not comparison.measure.less_is_better)
        for index, row in column.iterrows():
            place = ordered.index(float(row["text"])) + 1 if index in shown.index else 0
            std = "" if row["spread"] == MISSING else row["spread"]
            cells.setdefault(row["label"], []).append(CellText(row["text"], std, place if place <= 2 else 0))
    return cells


def _of_equal_seeds(column: pd.DataFrame) -> pd.DataFrame:
    """Those of a column's cells that rest on the same seeds as most others; none where no two have the same."""
    counts = Counter(column["over"])
    if len(counts) < 2:
        return column
    over, count = max(counts.items(), key=lambda item: (item[1], len(item[0])))
    return column[[own == over and count > 1 for own in column["over"]]]


def further_columns(comparison: Compared) -> dict[str, str]:
    """{column of the methods: its heading} of what follows the accuracies; budgets are shown where records hold them.

    Both budgets count a whole run, over all clients.
    """
    tests = {"difference": f"Δ {comparison.baseline}", "p_value": "p", "p_holm": "p Holm", "pairs": "Pairs"}
    heads = {"seeds": "Seeds", "rank": "Rank"}
    heads |= {key: tests[key] for key in tests if comparison.baseline and key in comparison.methods}
    heads |= {key: key.capitalize() for key in BUDGETS if comparison.methods[key].notna().any()}
    return heads | {
        "bytes_down_per_round": "Down/round",
        "bytes_up_per_round": "Up/round",
        "seconds_per_round": "s/round",
    }


def further_cells(comparison: Compared, row: pd.Series) -> list[str]:
    """Texts of the columns that follow the accuracies."""
    texts: dict[str, Callable[[Any], str]] = {
        "seeds": lambda seeds: f"{seeds} of {row['seeds_begun']}" if seeds < row["seeds_begun"] else str(seeds),
        "rank": lambda rank: f"{rank} {MARKS[row['group']]}".rstrip(),
        "difference": lambda value: f"{100 * value:+.1f}",
        "p_value": p_text,
        "p_holm": p_text,
        "pairs": lambda value: MISSING if row["label"] == comparison.baseline else str(value),
        "bytes_down_per_round": amount,
        "bytes_up_per_round": amount,
        "seconds_per_round": "{:.1f}".format,
    } | dict.fromkeys(BUDGETS, "{:,.0f}".format)
    return [MISSING if pd.isna(row[key]) else texts[key](row[key]) for key in further_columns(comparison)]


def p_text(p_value: float) -> str:
    """`.016`, or `<.001` for smaller ones."""
    return "<.001" if p_value < 0.001 else f"{p_value:.3f}".removeprefix("0")


def published_cells(comparison: Compared) -> list[tuple[str, list[CellText]]]:
    """(label with its source, cells in the order of `columns`) of the papers' rows."""
    rows = []
    for (label, source), own in comparison.published.groupby(["label", "source"], sort=False):
        found = {
            row.target: CellText(percent(row.mean), "" if math.isnan(row.std) else percent(row.std))
            for row in own[["target", "mean", "std"]].itertuples()
        }
        cells = [found.get(target, CellText(MISSING)) for target in columns(comparison)]
        rows.append((f"{label} ({source}, published)", cells))
    return rows


def shown_label(row: pd.Series) -> str:
    """Label of a method; a dagger marks those that use images of the target."""
    return f"{row['label']} {MARKS[row['group']]}".rstrip()


def by_group(comparison: Compared) -> list[pd.DataFrame]:
    """The methods in groups that are ranked separately; those that never see the target come first."""
    return [rows for _, rows in comparison.methods.groupby("group", sort=False)]


def plain(cell: CellText) -> str:
    """The mean, and the deviation if there is one: `87.5 ± 1.2`."""
    return f"{cell.mean} ± {cell.std}" if cell.std else cell.mean


def columns(comparison: Compared) -> list[str]:
    """The columns of the accuracies: the targets and `average`."""
    return [*comparison.targets, AVERAGE]


def head(comparison: Compared) -> list[str]:
    """Headings of the columns of the method and the accuracies."""
    return ["Method", *comparison.targets, "Average"]
