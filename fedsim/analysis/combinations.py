"""What figures and a report show of a combination search, from the combinations.csv in an experiment's folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedsim.common.tables import Cell, Column, Row, Table
from fedsim.records.reading import Runs, run_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "combinations.csv"
OTHERS = "#bbbbbb"


def searches(folder: Path) -> list[tuple[str, pd.DataFrame]]:
    """(what was searched, its rows) of every search in an experiment's folder."""
    file = folder / NAME
    if not file.is_file():
        return []
    groups = pd.read_csv(file).groupby(["method", "search"], sort=False)
    return [(f"{method}: {search}", rows) for (method, search), rows in groups]


def searches_of(runs: Runs) -> list[tuple[str, pd.DataFrame]]:
    """(what was searched, its rows) of every search in the folders of some runs, OUTPUT/EXPERIMENT."""
    folders = dict.fromkeys(run_folder(runs, run).resolve().parents[2] for run in runs.experiments)
    return [search for folder in folders for search in searches(folder)]


def figures(searches: list[tuple[str, pd.DataFrame]], name: str) -> "Iterator[tuple[str, Figure]]":
    """(key, figure) of every search: the score of each candidate by rung, those of the last rung with their names."""
    for number, (_, rows) in enumerate(searches, 1):
        yield f"combinations-{number}", _figure(rows[rows["rung"] > 0], name)


def _figure(rows: pd.DataFrame, name: str) -> "Figure":
    from fedsim.analysis.figure_style import panels

    targets = list(dict.fromkeys(rows["target"]))
    tried = rows["candidate"].nunique()
    title = f"{name}: {tried} combinations of parts, scored on source domains left out"
    figure, axes = panels(len(targets), [""], title)
    figure.set_figwidth(9)
    for panel, target in zip(axes[:, 0], targets):
        _candidates(panel, rows[rows["target"] == target])
        panel.set_title(f"without {target}")
        panel.set_ylabel("mean score (%)")
    return figure


def _candidates(axes: "Axes", rows: pd.DataFrame) -> None:
    """Draw the scores of the candidates of one target; those that did not reach the last rung are grey."""
    from fedsim.analysis.figure_style import legend_beside, styles

    last = rows[rows["rung"] == rows["rung"].max()].sort_values("score", ascending=False, kind="stable")
    names = {}
    for row in last.itertuples():
        names[row.candidate] = f"{row.candidate:.0f}: {row.changes.replace(',', ', ')}"
    looks = styles(names.values())
    for candidate, line in rows.sort_values("rung").groupby("candidate"):
        style: dict[str, Any] = {"color": OTHERS, "zorder": 2}
        if label := names.get(candidate, ""):
            style = {"color": looks[label].color, "linestyle": looks[label].line, "label": label, "zorder": 3}
        axes.plot(line["rung"], 100 * line["score"], marker="o", markersize=3, **style)
    folds = rows.drop_duplicates("rung").set_index("rung")["folds"].str.count(",").add(1).sort_index()
    axes.set_xticks(folds.index, [f"rung {rung}\nfolds: {count}" for rung, count in folds.items()])
    legend_beside([axes], looks)


def tables(runs: Runs) -> list[Table]:
    """A table of every search, which is its title: each candidate with the last rung that it reached."""
    columns = [
        Column("without", "left"),
        Column("no."),
        Column("changes", "left", style="long"),
        Column("rung"),
        Column("score (%)"),
        Column("outcome", "left", style="long"),
    ]
    found = []
    for title, search in searches_of(runs):
        tried = search[search["rung"] > 0].drop_duplicates(["target", "candidate"], keep="last")
        ordered = tried.sort_values(["target", "rung", "score"], ascending=[True, False, False], kind="stable")
        refused = search[search["rung"] == 0].drop_duplicates("changes")
        notes = [f"left out, or drawn again: {row.changes}: {row.outcome}" for row in refused.itertuples()]
        found.append(Table(columns, [_candidate(row) for row in ordered.itertuples()], title, notes=notes))
    return found


def _candidate(row: Any) -> Row:
    """The row of a candidate; row: one of `itertuples` of a search."""
    number = Cell(f"{row.candidate:.0f}", value=row.candidate)
    score = Cell("" if pd.isna(row.score) else f"{100 * row.score:.1f}", value=row.score)
    return Row([row.target, number, row.changes, str(row.rung), score, row.outcome])
