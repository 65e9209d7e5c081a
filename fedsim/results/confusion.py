"""The confusion matrices of one method, a panel per target."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.results.figure_style import set_title, unseen, width_of, written
from fedsim.results.metrics import confusion_matrix
from fedsim.results.predictions import Predictions

MOST_CLASSES = 40  # with more, a cell is too small to be seen
MOST_NUMBERS = 10  # up to so many classes, the shares are written into the cells


def confusion_figure(by_target: dict[str, Predictions], name: str, label: str, rule: str) -> Figure | None:
    """Share of each class's images (row) that is taken for each class (column), pooled over seeds.

    rule: the selected round in words. None with more than 40 classes.
    """
    classes = [written(one, 14) for one in next(iter(by_target.values())).classes]
    if len(classes) > MOST_CLASSES:
        return None
    columns = min(len(by_target), 4)
    rows = -(-len(by_target) // columns)
    side = max(2.0, 0.13 * len(classes), 0.36 * min(len(classes), MOST_NUMBERS))
    margin = 0.085 * max(map(width_of, classes))
    figure = Figure(figsize=((side + 0.2) * columns + margin + 0.8, (side + 0.5) * rows + margin + 0.9))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    title = f"{name}, {label}: confusion on the unseen domain (% of the images of each class)"
    set_title(figure, f"{title}\n({rule})")
    for number, (one, (target, predictions)) in enumerate(zip(axes.ravel(), by_target.items())):
        _panel(one, confusion_matrix(predictions), classes)
        one.tick_params(labelbottom=number + columns >= len(by_target))  # only panels without another panel below
        one.set_title(unseen(target))
    for one in axes.ravel()[len(by_target) :]:
        one.set_visible(False)
    figure.supxlabel("predicted class", fontsize=9)
    figure.supylabel("class", fontsize=9)
    return figure


def _panel(axes: Axes, matrix: np.ndarray, classes: list[str]) -> None:
    total = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(100.0 * matrix, total, out=np.full(matrix.shape, np.nan), where=total > 0)
    axes.imshow(shares, vmin=0, vmax=100, cmap="Blues")
    axes.grid(visible=False)
    size = 7 if len(classes) > 12 else 8
    axes.set_xticks(range(len(classes)), classes, rotation=90, fontsize=size)
    axes.set_yticks(range(len(classes)), classes, fontsize=size)
    if len(classes) > MOST_NUMBERS:
        return
    for row, column in np.argwhere(np.isfinite(shares)):
        share = shares[row, column]
        if share >= 0.5:
            colour = "white" if share > 55 else "#222222"
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=7, color=colour)
