"""The figure of the accuracy per target: a panel of bars for each target and the average."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.results.comparison import Comparison, shown_label
from fedsim.results.figure_style import Looks, lines_of, set_title, unseen, wrapped


def target_bars(comparison: Comparison, name: str, looks: Looks) -> Figure | None:
    """Accuracy per target and average, with the seeds as points."""
    cells, runs = comparison.cells, comparison.table
    if cells["mean"].isna().all():
        return None
    groups, labels = [*comparison.targets, "average"], list(comparison.methods["label"])
    rows = -(-len(groups) // 5)
    columns = -(-len(groups) // rows)
    texts = [wrapped(shown_label(row)) for _, row in comparison.methods.iterrows()]
    height = max(0.3, 0.16 * lines_of(texts)) * len(labels)
    figure = Figure(figsize=(1.9 * columns + 1.5, rows * (height + 0.9) + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    words = "bars mean ± std over seeds, points seeds" if comparison.most_seeds > 1 else "one seed"
    set_title(figure, f"{name}: {comparison.measured}\n({comparison.rule}; {words})")
    start = max(0, 10 * int(10 * runs["accuracy"].min()) - 10)
    for number, (one, group) in enumerate(zip(axes.ravel(), groups)):
        own = cells[cells["target"] == group].set_index("label").reindex(labels)
        _bars(one, own, runs[runs["target"] == group], looks)
        one.tick_params(labelbottom=number + columns >= len(groups))  # only panels without another panel below
        one.set_title("average" if group == "average" else unseen(group))
    for one in axes.ravel()[len(groups) :]:
        one.set_visible(False)
    axes[0][0].set_yticks(range(len(labels)), texts)
    # All panels share the axis, so this holds for all of them: the first method is on top, without a gap above it.
    axes[0][0].set_ylim(len(labels) - 0.4, -0.6)
    axes[0][0].set_xlim(left=start)
    # Bars that do not start at zero exaggerate differences, so the label of the axis says where they start.
    words = f"target {comparison.measure.title} (%)"
    figure.supxlabel(f"{words}, axis from {start}" if start else words, fontsize=9)
    return figure


def _bars(axes: Axes, own: pd.DataFrame, seeds: pd.DataFrame, looks: Looks) -> None:
    places = range(len(own))
    axes.barh(
        places,
        100 * own["mean"],
        0.75,
        color=[looks[label].color for label in own.index],
        alpha=0.75,
        hatch=[looks[label].hatch for label in own.index],
        edgecolor="white",
        linewidth=0.5,
    )
    spread = own["std"].notna().to_numpy()
    if spread.any():
        axes.errorbar(
            100 * own["mean"][spread],
            [place for place, has in zip(places, spread) if has],
            xerr=100 * own["std"][spread],
            fmt="none",
            ecolor="#222222",
            elinewidth=1,
            capsize=2,
        )
    axes.scatter(
        100 * seeds["accuracy"],
        seeds["label"].map(list(own.index).index),
        s=10,
        color="white",
        edgecolors="#222222",
        linewidths=0.7,
        zorder=3,
    )
    axes.grid(axis="y", visible=False)
