"""The figure of the papers' differences to FedAvg beside ours: does the order of methods carry over?"""

from matplotlib.figure import Figure

from fedsim.results.agreement import BASELINE, FEWEST, MEAN, OURS, beside_fedavg, in_words
from fedsim.results.comparison import Comparison
from fedsim.results.figure_style import COLORS, MARKERS, legend_below, set_title, written
from fedsim.results.statistics import over_seeds
from fedsim.settings.experiment import Experiment


def beside_papers(comparison: Comparison, experiment: Experiment, name: str) -> Figure | None:
    """Difference to FedAvg of every method that a paper prints for this data set: ours, and that of each paper.

    The line of a method joins ours and the papers' mean. None where ours and the papers share too few methods.
    """
    frame = 100 * beside_fedavg(comparison.table, experiment, comparison.targets)
    if frame.empty or not comparison.measure.primary:
        return None
    frame = frame.dropna(subset=[OURS]).dropna(axis="columns", how="all").sort_values(OURS)
    if len(frame) < FEWEST:
        return None
    shown = frame.drop(index=BASELINE)
    figure = Figure(figsize=(6.4, 0.3 * len(shown) + 1.6), layout="constrained")
    axes = figure.subplots()
    tau = in_words(frame[[OURS, MEAN]])
    rule = f"{comparison.rule}; {over_seeds(comparison.most_seeds)}"
    set_title(figure, f"{name}: difference to FedAvg here and in papers\nKendall's tau {tau}; {rule}")
    rows = range(len(shown))
    axes.hlines(rows, shown[OURS], shown[MEAN], color="#999999", linewidth=1, zorder=1)
    for place, column in enumerate(frame.drop(columns=MEAN)):
        ours = column == OURS
        axes.plot(
            shown[column],
            rows,
            linestyle="none",
            marker=MARKERS[place],
            color=COLORS[place],
            fillstyle="full" if ours else "none",
            markersize=8 if ours else 6,
            label=column,
        )
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.set_yticks(rows, [written(str(method)) for method in shown.index])
    axes.set_ylabel("method")
    axes.set_xlabel("accuracy on the unseen domains, points above FedAvg of the same table")
    legend_below(figure, frame.columns)
    return figure
