"""The figures of a comparison: accuracy per target, cost and accuracy, the papers' order of methods, mean ranks."""

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from fedsim.analysis.across import LEVEL, Pairs
from fedsim.analysis.agreement import BASELINE, FEWEST, MEAN, OURS, against_fedavg, in_words
from fedsim.analysis.comparison import Comparison, shown_label
from fedsim.analysis.figure_style import (
    COLORS,
    MARKERS,
    Looks,
    Style,
    legend_below,
    lines_of,
    set_title,
    unseen,
    wrapped,
    written,
)
from fedsim.analysis.statistics import over_seeds
from fedsim.common.tasks import CLASSIFICATION
from fedsim.settings.experiment import Experiment

FRONT = "cost-quality front"
MOST_APART = 14  # methods that a reader can tell apart; of more, only those on the front have a mark of their own
OTHER_METHODS = "other methods"
OTHERS = Style("#BBBBBB", "-", ".", "")
COSTS = {"gigabytes": "exchanged in one run, up and down", "minutes": "wall time of one run"}
STEP = 0.36  # inches between two names on the axis of ranks


def target_bars(comparison: Comparison, name: str, looks: Looks) -> Figure | None:
    """Accuracy per target and average, a panel for each: means with their deviations, and the seeds as points."""
    cells, runs = comparison.cells, comparison.table
    if cells["mean"].isna().all():
        return None
    labels = list(comparison.methods["label"])
    texts = [wrapped(shown_label(method)) for method in comparison.methods.to_dict("records")]
    height = max(0.3, 0.16 * lines_of(texts)) * len(labels)
    figure, panels = _bar_panels(comparison, height)
    seeds = "mean ± std over seeds, white points: seeds" if comparison.most_seeds > 1 else "one seed"
    set_title(figure, f"{name}: {comparison.measured}\n({comparison.rule}; {seeds})")
    for panel, target in zip(panels, comparison.columns):
        means = cells[cells["target"] == target].set_index("label")
        means = means.reindex(labels)
        points = runs[runs["target"] == target]
        _means(panel, means, points, looks, comparison.measure.factor)
    # All panels share the axis, so this holds for all of them: the first method is on top, without a gap above it.
    panels[0].set_yticks(range(len(labels)), texts)
    panels[0].set_ylim(len(labels) - 0.4, -0.6)
    start = _start_of_axis(runs["accuracy"]) if comparison.measure.is_fraction else 0
    panels[0].set_xlim(left=start)
    # An axis that does not start at zero makes differences look large, so its label says where it starts.
    title = f"target {comparison.measure.heading}"
    if start:
        title += f", axis from {start}"
    figure.supxlabel(title, fontsize=9)
    return figure


def _start_of_axis(accuracies: pd.Series) -> int:
    """The percentage at which the axis begins, a multiple of ten below the least accuracy (a fraction)."""
    least = int(10 * accuracies.min())
    return max(0, 10 * least - 10)


def _bar_panels(comparison: Comparison, height: float) -> tuple[Figure, list[Axes]]:
    """(a figure, its panels for the targets and the average, at most five in a row); height: of a panel in inches."""
    count = len(comparison.columns)
    rows = -(-count // 5)
    columns = -(-count // rows)
    width = 1.9 * columns + 1.5
    size = (width, rows * (height + 0.9) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.ravel())
    for number, (panel, target) in enumerate(zip(panels, comparison.columns)):
        has_panel_below = number + columns < count
        panel.tick_params(labelbottom=not has_panel_below)
        panel.set_title(unseen(target) if target in comparison.targets else target)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels


def _means(axes: Axes, means: pd.DataFrame, runs: pd.DataFrame, looks: Looks, factor: int) -> None:
    """Draw the means of one target with their deviations, a row per label, and the runs as points above each row.

    factor: 100 for percent
    """
    places = pd.Series(range(len(means)), index=means.index)
    for label, place in places.items():
        style = looks[str(label)]
        spread = factor * means["std"][label]
        axes.errorbar(
            factor * means["mean"][label],
            place,
            xerr=None if math.isnan(spread) else spread,
            fmt=style.marker,
            color=style.color,
            markersize=6,
            elinewidth=1.5,
            capsize=3,
        )
    axes.scatter(
        factor * runs["accuracy"],
        runs["label"].map(places).astype(float) - 0.28,
        s=10,
        color="white",
        edgecolors="#222222",
        linewidths=0.7,
        zorder=3,
    )
    axes.grid(axis="y", visible=False)


def cost_front(comparison: Comparison, costs: pd.DataFrame, name: str, looks: Looks) -> Figure | None:
    """Average accuracy against the cost of a whole run, with a line through the methods that are on the front.

    A method is on the front when no cheaper method has an accuracy at least as high. Methods that use images of the
    target have a mark and are not compared with the others, so that the front is of the first group alone. Of many
    methods only those on the front and the baseline have a name.
    costs: its index holds the labels, its columns are gigabytes and minutes.
    """
    columns = [column for column in COSTS if costs[column].notna().any()]
    shown = [shown_label(method) for method in comparison.methods.to_dict("records")]
    methods = comparison.methods.assign(shown=shown)
    methods = methods.dropna(subset=["average"]).set_index("label")
    if not columns or methods.empty:
        return None
    figure = Figure(figsize=(4.3 * len(columns), 3.8), layout="constrained")
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    rule = f"{comparison.rule}; {over_seeds(methods['seeds'].max())}"
    set_title(figure, f"{name}: cost and {comparison.measure.title}\n({rule})")
    for panel, column in zip(axes, columns):
        greatest = float(costs[column].max())
        factor, unit = readable(greatest, column)
        points = methods.assign(cost=factor * costs[column])
        points = points.dropna(subset=["cost"])
        _costs(panel, points, comparison, looks)
        panel.set_xlabel(f"{COSTS[column]} ({unit})")
    axes[0].set_ylabel(f"average target {comparison.measure.heading}")
    legend_below(figure, [*methods["shown"], OTHER_METHODS, FRONT])
    return figure


def _costs(axes: Axes, points: pd.DataFrame, comparison: Comparison, looks: Looks) -> None:
    """Draw the front and the methods; points: a row per label with its average, its cost and the text of its label."""
    first_group = comparison.methods["group"].iloc[0]
    measure = comparison.measure
    front = _front(points[points["group"] == first_group], measure.less_is_better)
    if len(front) > 1:
        axes.step(
            front["cost"],
            measure.factor * front["average"],
            where="post",
            label=FRONT,
            color="#999999",
            linewidth=1,
            zorder=1,
        )
    apart = list(points.index)
    if len(points) > MOST_APART:
        apart = [*front.index, comparison.baseline]
    for label, row in points.iterrows():
        is_apart = label in apart
        style = looks[label] if is_apart else OTHERS
        axes.errorbar(
            row["cost"],
            measure.factor * row["average"],
            yerr=0 if pd.isna(row["average_std"]) else measure.factor * row["average_std"],
            color=style.color,
            marker=style.marker,
            markersize=7,
            capsize=2,
            linestyle="none",
            label=row["shown"] if is_apart else OTHER_METHODS,
        )
    _scale(axes, points["cost"])


def _scale(axes: Axes, costs: pd.Series) -> None:
    """Make the axis logarithmic where the greatest cost is more than ten times the least."""
    if len(costs) and costs.max() > 10 * costs.min() > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    else:
        axes.set_xlim(0, 1.1 * costs.max() or 1)


def readable(most: float, column: str) -> tuple[float, str]:
    """(factor, unit) with which the greatest cost is a number that is neither very large nor very small."""
    if column == "gigabytes":
        units = {1.0: (1.0, "GB"), 1e-3: (1e3, "MB"), 0.0: (1e6, "kB")}
    else:
        units = {120: (1 / 60, "h"), 2: (1.0, "min"), 0.0: (60.0, "s")}
    fitting = [unit for least, unit in units.items() if most >= least]
    return fitting[0]


def _front(points: pd.DataFrame, less_is_better: bool) -> pd.DataFrame:
    """The points that have a better average than all cheaper ones."""
    score = -points["average"] if less_is_better else points["average"]
    ordered = points.assign(score=score).sort_values(["cost", "score"], ascending=[True, False])
    best_before = ordered["score"].cummax().shift(fill_value=-math.inf)
    return ordered[ordered["score"] > best_before]


def against_papers(comparison: Comparison, experiment: Experiment, name: str) -> Figure | None:
    """Difference to FedAvg of every method that a paper prints for this data set: ours, and that of each paper.

    The line of a method joins ours and the papers' mean. None where ours and the papers share too few methods.
    """
    frame = 100 * against_fedavg(comparison.table, experiment, comparison.targets)
    if frame.empty or comparison.metric != CLASSIFICATION.metric:
        return None
    frame = frame.dropna(subset=[OURS]).dropna(axis="columns", how="all")
    frame = frame.sort_values(OURS)
    if len(frame) < FEWEST:
        return None
    height = 0.3 * (len(frame) - 1) + 1.6
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    tau = in_words(frame[[OURS, MEAN]])
    rule = f"{comparison.rule}; {over_seeds(comparison.most_seeds)}"
    set_title(figure, f"{name}: difference to FedAvg here and in papers\nKendall's tau {tau}; {rule}")
    _paper_marks(axes, frame.drop(index=BASELINE))
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.set_ylabel("method")
    axes.set_xlabel("accuracy on the unseen domains, points above FedAvg of the same table")
    legend_below(figure, frame.columns)
    return figure


def _paper_marks(axes: Axes, shown: pd.DataFrame) -> None:
    """Draw a mark for each method (row) and table (column), and lines from ours to the papers' mean."""
    rows = range(len(shown))
    axes.hlines(
        rows,
        shown[OURS],
        shown[MEAN],
        color="#999999",
        linewidth=1,
        zorder=1,
    )
    for place, column in enumerate(shown.drop(columns=MEAN)):
        is_ours = column == OURS
        axes.plot(
            shown[column],
            rows,
            linestyle="none",
            marker=MARKERS[place],
            color=COLORS[place],
            fillstyle="full" if is_ours else "none",
            markersize=8 if is_ours else 6,
            label=column,
        )
    names = [written(str(method)) for method in shown.index]
    axes.set_yticks(rows, names)


def critical_figure(pairs: Pairs, name: str) -> Figure:
    """Mean ranks, the best at the left (Demšar, JMLR 2006); a bar joins methods of which no two differ.

    We join by Wilcoxon's test with Holm's correction, as Benavoli et al. (JMLR 2016) advise, not by Nemenyi's distance.
    """
    ranks, groups = pairs.ranks, pairs.groups
    half = -(-len(ranks) // 2)
    height = half + len(groups) + 1
    figure = Figure(figsize=(7.5, STEP * height + 1.1), layout="constrained")
    axes = figure.subplots()
    set_title(figure, f"{name}: mean rank over {pairs.blocks} unseen domains\n(joined: no pair differs, Holm, {LEVEL})")
    low = int(ranks.min())
    greatest = math.ceil(ranks.max())
    high = max(greatest, low + 1)
    margin = 0.06 * (high - low)
    for place, (label, rank) in enumerate(ranks.items()):
        text = f" {written(str(label))} ({rank:.2f}) "
        if place < half:
            _name_of_rank(
                axes,
                text,
                rank,
                len(groups) + 1 + place,
                low - margin,
                "right",
            )
        else:
            _name_of_rank(
                axes,
                text,
                rank,
                len(groups) + len(ranks) - place,
                high + margin,
                "left",
            )
    _join(axes, pairs)
    axes.set_ylim(height, 0)
    _rank_axis(axes, low, high)
    return figure


def _join(axes: Axes, pairs: Pairs) -> None:
    """Draw a bar over each group, one below the other."""
    for number, group in enumerate(pairs.groups, 1):
        axes.plot(
            [pairs.ranks[group[0]], pairs.ranks[group[-1]]],
            [number, number],
            color=COLORS[0],
            linewidth=4,
            solid_capstyle="round",
            zorder=2,
        )


def _rank_axis(axes: Axes, low: int, high: int) -> None:
    """Draw nothing but an axis of ranks at the top."""
    axes.set_xlim(low, high)
    axes.xaxis.tick_top()
    axes.set_xticks(range(low, high + 1))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.spines["top"].set_visible(True)
    axes.set_yticks([])
    axes.grid(visible=False)


def _name_of_rank(axes: Axes, text: str, rank: float, row: float, end: float, side: Any) -> None:
    """Draw a line from a rank on the axis down to a row and sideways to its end, where the name stands."""
    axes.plot(
        [rank, rank, end],
        [0, row, row],
        color="#666666",
        linewidth=0.9,
        zorder=1,
    )
    axes.text(end, row, text, ha=side, va="center")
