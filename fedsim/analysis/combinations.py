"""What figures and a report show of a combination search, from the combinations.csv in an experiment's folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedsim.common.tables import Cell, Column, Row, Table
from fedsim.records.readers import named
from fedsim.records.reading import Runs, run_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "combinations.csv"
READ = ["rung", "score", "target", "candidate", "folds"]  # its columns that figures need
TEXTS = ["method", "search", "target", "changes", "slots", "folds", "outcome"]  # also where they look like numbers
OTHERS = "#bbbbbb"
Searches = list[tuple[str, pd.DataFrame]]  # what was searched, and its rows
Style = dict[str, Any]  # arguments of matplotlib


def searches(folder: Path) -> Searches:
    """(what was searched, its rows) of every search in an experiment's folder; UserError for a damaged file."""
    file = folder / NAME
    if not file.is_file():
        return []
    with named(file, "the rows"):
        frame = pd.read_csv(
            file,
            dtype=dict.fromkeys(TEXTS, str),
            keep_default_na=False,
            na_values=[""],
        )
        if len(frame):
            columns = frame[READ]  # a KeyError without them
            numbers = columns[["rung", "score"]]
            numbers.astype(float)  # a ValueError for text
        groups = frame.groupby(["method", "search"], sort=False)
    by_search = []
    for (method, search), rows in groups:
        by_search.append((f"{method}: {search}", rows))
    return by_search


def searches_of(runs: Runs) -> Searches:
    """(what was searched, its rows) of every search in the folders of some runs, OUTPUT/EXPERIMENT."""
    folders: dict[Path, None] = {}
    for run in runs.experiments:
        folder = run_folder(runs, run).resolve()
        folders[folder.parents[2]] = None
    rows = []
    for folder in folders:
        rows += searches(folder)
    return rows


def figures(searches: Searches, name: str) -> "Iterator[tuple[str, Figure]]":
    """(key, figure) of every search: the score of each candidate by rung, those of the last rung with their names."""
    for number, (_, rows) in enumerate(searches, 1):
        tried = rows[rows["rung"] > 0]
        yield f"combinations-{number}", _figure(tried, name)


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
    from fedsim.analysis.figure_style import legend_right, styles

    last = rows[rows["rung"] == rows["rung"].max()]
    last = last.sort_values("score", ascending=False, kind="stable")
    names = {}
    for row in last.itertuples():
        changes = row.changes.replace(",", ", ")
        names[row.candidate] = f"{row.candidate:.0f}: {changes}"
    looks = styles(names.values())
    for candidate, line in rows.sort_values("rung").groupby("candidate"):
        style: Style = {"color": OTHERS, "zorder": 2}
        if label := names.get(candidate, ""):
            style = {
                "color": looks[label].color,
                "linestyle": looks[label].line,
                "label": label,
                "zorder": 3,
            }
        axes.plot(
            line["rung"],
            100 * line["score"],
            marker="o",
            markersize=3,
            **style,
        )
    rungs = rows.drop_duplicates("rung").sort_values("rung")
    counts = rungs["folds"].str.count(",") + 1
    ticks = []
    for rung, count in zip(rungs["rung"], counts):
        ticks.append(f"rung {rung}\nfolds: {count}")
    axes.set_xticks(rungs["rung"], ticks)
    legend_right([axes], looks)


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
    shown = []
    for title, search in searches_of(runs):
        tried = search[search["rung"] > 0]
        tried = tried.drop_duplicates(["target", "candidate"], keep="last")
        ordered = tried.sort_values(["target", "rung", "score"], ascending=[True, False, False], kind="stable")
        refused = search[search["rung"] == 0]
        refused = refused.drop_duplicates("changes")
        notes = []
        for row in refused.itertuples():
            notes.append(f"left out, or drawn again: {row.changes}: {row.outcome}")
        candidates = [_candidate(row) for row in ordered.itertuples()]
        shown.append(Table(columns, candidates, title, notes=notes))
    return shown


def _candidate(row: Any) -> Row:
    """The row of a candidate; row: one of `itertuples` of a search."""
    number = Cell(f"{row.candidate:.0f}", value=row.candidate)
    text = ""
    if pd.notna(row.score):
        text = f"{100 * row.score:.1f}"
    score = Cell(text, value=row.score)
    cells = [row.target, number, row.changes, str(row.rung), score, row.outcome]
    return Row(cells)
