"""The texts of a comparison's cells, which are the same in all formats: accuracies, costs, tests, published rows."""

import math
from collections import Counter
from dataclasses import dataclass

import pandas as pd

from fedsim.results.compared import Compared
from fedsim.results.notes import mark
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
    if pd.isna(size):
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def accuracy_cells(comparison: Compared) -> dict[str, dict[str, CellText]]:
    """{label: {target or `average`: CellText}}; the first and second place of each column follow the printed numbers.

    Methods that use images of the target have no place, because they are ranked apart, nor do those with other seeds in
    the column than most.
    """
    texts = comparison.cells.assign(
        text=comparison.cells["mean"].map(percent), spread=comparison.cells["std"].map(percent)
    )
    first_group = comparison.methods["group"].iloc[0]
    ranked = set(comparison.methods.loc[comparison.methods["group"] == first_group, "label"])
    cells: dict[str, dict[str, CellText]] = {}
    for target, column in texts.groupby("target", sort=False):
        # Places follow the printed numbers: a reader would not understand why only one of two equal texts is bold.
        shown = _of_equal_seeds(column[column["label"].isin(ranked) & (column["text"] != MISSING)])
        ordered = sorted({float(text) for text in shown["text"]}, reverse=not comparison.less_is_better)
        for index, row in column.iterrows():
            place = ordered.index(float(row["text"])) + 1 if index in shown.index else 0
            std = "" if row["spread"] == MISSING else row["spread"]
            cells.setdefault(row["label"], {})[str(target)] = CellText(row["text"], std, place if place <= 2 else 0)
    return cells


def _of_equal_seeds(column: pd.DataFrame) -> pd.DataFrame:
    """Those of a column's cells that rest on the same seeds as most others; none where no two have the same."""
    counts = Counter(column["over"])
    if len(counts) < 2:
        return column
    over, count = max(counts.items(), key=lambda item: (item[1], len(item[0])))
    return column[[own == over and count > 1 for own in column["over"]]]


def further_columns(comparison: Compared) -> list[str]:
    """Headings of the columns that follow the accuracies."""
    names = {"difference": f"Δ {comparison.baseline}", "p_value": "p", "p_holm": "p Holm", "pairs": "Pairs"}
    tests = [names[key] for key in shown_tests(comparison)]
    budgets = [name.capitalize() for name in shown_budgets(comparison)]
    return ["Seeds", "Rank", *tests, *budgets, "Down/round", "Up/round", "s/round"]


def shown_tests(comparison: Compared) -> list[str]:
    """The columns of the tests against the baseline."""
    tests = ("difference", "p_value", "p_holm", "pairs") if comparison.baseline else ()
    return [name for name in tests if name in comparison.methods]


def shown_budgets(comparison: Compared) -> list[str]:
    """Those of the columns `images` and `steps` that the records hold; both count a whole run, over all clients."""
    return [name for name in BUDGETS if comparison.methods[name].notna().any()]


def further_values(comparison: Compared, row: pd.Series) -> list[float]:
    """The numbers of the columns that follow the accuracies; NaN for a missing number."""
    keys = ["seeds", "rank", *shown_tests(comparison), *shown_budgets(comparison)]
    keys += ["bytes_down_per_round", "bytes_up_per_round", "seconds_per_round"]
    return [math.nan if pd.isna(row[key]) else float(row[key]) for key in keys]


def further_cells(comparison: Compared, row: pd.Series) -> list[str]:
    """Texts of the columns that follow the accuracies."""
    texts = {
        "difference": lambda value: f"{100 * value:+.1f}",
        "p_value": p_text,
        "p_holm": p_text,
        "pairs": lambda value: MISSING if row["label"] == comparison.baseline else str(value),
    }
    seconds = row["seconds_per_round"]
    incomplete = f" of {row['seeds_begun']}" if row["seeds"] < row["seeds_begun"] else ""
    return [
        f"{row['seeds']}{incomplete}",
        MISSING if pd.isna(row["rank"]) else f"{row['rank']} {mark(row)}".rstrip(),
        *(MISSING if pd.isna(row[key]) else texts[key](row[key]) for key in shown_tests(comparison)),
        *(MISSING if pd.isna(row[name]) else f"{row[name]:,.0f}" for name in shown_budgets(comparison)),
        amount(row["bytes_down_per_round"]),
        amount(row["bytes_up_per_round"]),
        MISSING if pd.isna(seconds) else f"{seconds:.1f}",
    ]


def p_text(p_value: float) -> str:
    """`.016`, or `<.001` for smaller ones."""
    return "<.001" if p_value < 0.001 else f"{p_value:.3f}".removeprefix("0")


def published_cells(comparison: Compared) -> list[tuple[str, str, dict[str, CellText]]]:
    """(label, source, {target: CellText}) of the papers' rows."""
    rows: dict[tuple[str, str], dict[str, CellText]] = {}
    for _, row in comparison.published.iterrows():
        std = "" if math.isnan(row["std"]) else percent(row["std"])
        rows.setdefault((row["label"], row["source"]), {})[row["target"]] = CellText(percent(row["mean"]), std)
    return [(label, source, cells) for (label, source), cells in rows.items()]


def shown_label(row: pd.Series) -> str:
    """Label of a method; a dagger marks those that use images of the target."""
    return f"{row['label']} {mark(row)}".rstrip()


def by_group(comparison: Compared) -> list[tuple[str, pd.DataFrame]]:
    """The methods in groups that are ranked separately; those that never see the target come first."""
    return [(str(group), rows) for group, rows in comparison.methods.groupby("group", sort=False)]


def plain(cell: CellText) -> str:
    """The mean, and the deviation if there is one: `87.5 ± 1.2`."""
    return f"{cell.mean} ± {cell.std}" if cell.std else cell.mean


def head(comparison: Compared) -> list[str]:
    """Headings of the columns of the method and the accuracies."""
    return ["Method", *comparison.targets, "Average"]
