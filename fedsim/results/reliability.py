"""Accuracy by confidence of each method on the unseen domains: how far its probabilities can be believed."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fedsim.results.figure_style import Looks, legend_below, panels, unseen
from fedsim.results.figures import few_enough
from fedsim.results.metrics import confidence_bins
from fedsim.results.predictions import Predictions

LEAST_IMAGES = 20  # in a bin; the share of fewer is mostly chance


def reliability_figure(
    kept: dict[str, dict[str, Predictions]], name: str, looks: Looks, best: Sequence[str], rule: str
) -> Figure | None:
    """Share of right predictions over their mean probability, in the bins of the calibration error, pooled over seeds.

    kept: {label: {target: predictions}}. A method below the diagonal is too sure of itself.
    Source: reliability diagrams of Guo et al., ICML 2017, section 2, with lines in place of bars.
    """
    if not kept:
        return None
    labels, few = few_enough(list(kept), best)
    targets = sorted({target for each in kept.values() for target in each})
    title = f"{name}: accuracy by confidence on the unseen domain{few}\n({rule}; bins of {LEAST_IMAGES} images or more)"
    figure, axes = panels(1, list(map(unseen, targets)), title)
    for one, target in zip(axes[0], targets):
        one.plot((0, 100), (0, 100), color="#999999", linewidth=0.8)
        for label in (label for label in labels if target in kept[label]):
            count, right, confidence = confidence_bins(kept[label][target])
            full = count >= LEAST_IMAGES
            x, y = (100 * total[full] / count[full] for total in (confidence, right))
            style = looks[label]
            one.plot(x, y, color=style.color, linestyle=style.line, marker=style.marker, markersize=3.5, label=label)
        one.set_xlabel("confidence (%)")
    axes[0][0].set_ylabel("accuracy (%)")
    legend_below(figure, looks)
    return figure
