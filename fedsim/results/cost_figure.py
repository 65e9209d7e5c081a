"""The figure of costs: accuracy against bytes and minutes of a whole run."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from fedsim.results.comparison import Comparison, shown_label
from fedsim.results.figure_style import Looks, Style, legend_below, set_title
from fedsim.results.statistics import over_seeds

FRONT = "cost-quality front"
MOST_APART = 14  # methods that a reader can tell apart; of more, only those on the front have a mark of their own
OTHER_METHODS = "other methods"
OTHERS = Style("#BBBBBB", "-", ".", "")
COSTS = {"gigabytes": "exchanged in one run, up and down", "minutes": "wall time of one run"}


def cost_front(comparison: Comparison, costs: pd.DataFrame, name: str, looks: Looks) -> Figure | None:
    """Average accuracy against the cost of a whole run, with a line through the methods that are on the front.

    A method is on the front when no cheaper method has an accuracy at least as high. Methods that use images of the
    target have a mark and are not compared with the others, so that the front is of the first group alone. Of many
    methods only those on the front and the baseline have a name.
    costs: its index holds the labels, its columns are gigabytes and minutes.
    """
    shown = [(column, title) for column, title in COSTS.items() if costs[column].notna().any()]
    methods = comparison.methods.assign(shown=comparison.methods.apply(shown_label, axis="columns"))
    methods = methods.dropna(subset=["average"]).set_index("label")
    if not shown or methods.empty:
        return None
    figure = Figure(figsize=(4.3 * len(shown), 3.8), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    set_title(
        figure,
        f"{name}: cost and {comparison.measure.title}\n({comparison.rule}; {over_seeds(methods['seeds'].max())})",
    )
    for one, (column, title) in zip(axes, shown):
        factor, unit = readable(float(costs[column].max()), column)
        points = methods.assign(cost=factor * costs[column]).dropna(subset=["cost"])
        front = _front(points[points["group"] == comparison.methods["group"].iloc[0]])
        if len(front) > 1:
            average = 100 * front["average"]
            one.step(front["cost"], average, where="post", label=FRONT, color="#999999", linewidth=1, zorder=1)
        apart = points.index if len(points) <= MOST_APART else [*front.index, comparison.baseline]
        for label, row in points.iterrows():
            style = looks[label] if label in apart else OTHERS
            spread = 0 if pd.isna(row["average_std"]) else 100 * row["average_std"]
            one.errorbar(
                row["cost"],
                100 * row["average"],
                yerr=spread,
                color=style.color,
                marker=style.marker,
                markersize=7,
                capsize=2,
                linestyle="none",
                label=row["shown"] if label in apart else OTHER_METHODS,
            )
        _scale(one, points["cost"])
        one.set_xlabel(f"{title} ({unit})")
    axes[0].set_ylabel(f"average target {comparison.measure.title} (%)")
    legend_below(figure, [*methods["shown"], OTHER_METHODS, FRONT])
    return figure


def _scale(axes: Axes, costs: pd.Series) -> None:
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
        return (1.0, "GB") if most >= 1 else (1e3, "MB") if most >= 1e-3 else (1e6, "kB")
    return (1 / 60, "h") if most >= 120 else (1.0, "min") if most >= 2 else (60.0, "s")


def _front(points: pd.DataFrame) -> pd.DataFrame:
    ordered = points.sort_values(["cost", "average"], ascending=[True, False])
    return ordered[ordered["average"] > ordered["average"].cummax().shift(fill_value=-1.0)]
