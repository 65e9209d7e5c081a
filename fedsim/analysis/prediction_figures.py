"""The figures of what runs have kept: confusion and reliability of predictions, and pictures of segmentations."""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fedsim.analysis.figure_style import Looks, legend_below, panels, set_title, unseen, width_of, written
from fedsim.analysis.figures import few_enough
from fedsim.analysis.metrics import confusion_matrix
from fedsim.common.lists import keys_of
from fedsim.records.calibration import confidence_bins
from fedsim.records.cases import Cases
from fedsim.records.predictions import Predictions

LEAST_IMAGES = 20  # in a bin of confidence; the share of fewer is mostly chance
MOST_CLASSES = 40  # with more, a cell of the confusion is too small to be seen
MOST_NUMBERS = 10  # up to so many classes, the shares are written into the cells
COLOURS = (  # of the structures
    ("green", "#1b9e77"), ("orange", "#d95f02"), ("violet", "#7570b3"), ("pink", "#e7298a"), ("lime", "#66a61e"),
    ("yellow", "#e6ab02"),
)  # fmt: skip
MISSED, INVENTED = "#d62728", "#1f77b4"
ROWS = ("image", "truth", "prediction", "error")
OPACITY = 0.55


def reliability_figure(
    predictions: dict[str, dict[str, Predictions]],
    name: str,
    looks: Looks,
    best: Sequence[str],
    rule: str,
) -> Figure | None:
    """Share of right predictions over their mean probability, in the bins of the calibration error, pooled over seeds.

    predictions: {label: {target: those of all seeds}}. A method below the diagonal is too sure of itself.
    Source: reliability diagrams of Guo et al., ICML 2017, section 2, with lines in place of bars.
    """
    if not predictions:
        return None
    labels, few = few_enough(list(predictions), best)
    targets = sorted(keys_of(predictions.values()))
    title = f"{name}: accuracy by confidence on the unseen domain{few}\n({rule}; bins of {LEAST_IMAGES} images or more)"
    heads = list(map(unseen, targets))
    figure, axes = panels(1, heads, title)
    for panel, target in zip(axes[0], targets):
        panel.plot((0, 100), (0, 100), color="#999999", linewidth=0.8)
        for label in labels:
            if target in predictions[label]:
                _reliability(panel, predictions[label][target], label, looks)
        panel.set_xlabel("confidence (%)")
    axes[0][0].set_ylabel("accuracy (%)")
    legend_below(figure, looks)
    return figure


def _reliability(axes: Axes, predictions: Predictions, label: str, looks: Looks) -> None:
    """Draw the line of one method."""
    count, right, confidence = confidence_bins(predictions)
    is_full = count >= LEAST_IMAGES
    images = count[is_full]
    style = looks[label]
    axes.plot(
        100 * confidence[is_full] / images,
        100 * right[is_full] / images,
        color=style.color,
        linestyle=style.line,
        marker=style.marker,
        markersize=3.5,
        label=label,
    )


def confusion_figure(by_target: dict[str, Predictions], name: str, label: str, rule: str) -> Figure | None:
    """Share of each class's images (row) that is taken for each class (column), a panel per target.

    rule: the selected round in words. The seeds are pooled. None with more than 40 classes.
    """
    first = next(iter(by_target.values()))
    classes = [written(each, 14) for each in first.classes]
    if len(classes) > MOST_CLASSES:
        return None
    count = len(by_target)
    columns = min(count, 4)
    rows = -(-count // columns)
    size = _confusion_size(rows, columns, classes)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    axes = list(grid.ravel())
    title = f"{name}, {label}: confusion on the unseen domain (% of the examples of each class)"
    set_title(figure, f"{title}\n({rule})")
    for number, (panel, target) in enumerate(zip(axes, by_target)):
        _confusion(panel, confusion_matrix(by_target[target]), classes)
        has_panel_below = number + columns < count
        panel.tick_params(labelbottom=not has_panel_below)
        panel.set_title(unseen(target))
    for panel in axes[count:]:
        panel.set_visible(False)
    figure.supxlabel("predicted class", fontsize=9)
    figure.supylabel("class", fontsize=9)
    return figure


def _confusion_size(rows: int, columns: int, classes: list[str]) -> tuple[float, float]:
    """Width and height of the figure in inches."""
    count = len(classes)
    side = max(2.0, 0.13 * count, 0.36 * min(count, MOST_NUMBERS))
    margin = 0.085 * max(map(width_of, classes))
    width = (side + 0.2) * columns + margin + 0.8
    height = (side + 0.5) * rows + margin + 0.9
    return width, height


def _confusion(axes: Axes, matrix: np.ndarray, classes: list[str]) -> None:
    """Draw the shares of a matrix of counts; those of at least half a percent are written, too."""
    total = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(
        100.0 * matrix,
        total,
        out=np.full(matrix.shape, np.nan),
        where=total > 0,
    )
    axes.imshow(shares, vmin=0, vmax=100, cmap="Blues")
    axes.grid(visible=False)
    size = 7 if len(classes) > 12 else 8
    axes.set_xticks(
        range(len(classes)),
        classes,
        rotation=90,
        fontsize=size,
    )
    axes.set_yticks(range(len(classes)), classes, fontsize=size)
    if len(classes) > MOST_NUMBERS:
        return
    for row, column in np.argwhere(shares >= 0.5):
        share = shares[row, column]
        colour = "white" if share > 55 else "#222222"
        axes.text(
            column,
            row,
            f"{share:.0f}",
            ha="center",
            va="center",
            fontsize=7,
            color=colour,
        )


def case_grid(cases: Cases, name: str, label: str, target: str) -> Figure:
    """Image, truth, prediction and error of the worst, middle and best images by mean Dice, a column for each.

    Each structure has a colour; later structures are drawn over earlier ones. The row of errors shows, for each pixel,
    the first structure that is wrong there: red where it was missed, blue where it was predicted but is not there.
    """
    count = len(cases.shown)
    width = 1.05 * count + 0.6
    height = 1.05 * len(ROWS) + 1.0
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(ROWS), count, squeeze=False)
    colours = []
    for structure, (colour, _) in zip(cases.structures, itertools.cycle(COLOURS)):
        colours.append(f"{written(structure)} {colour}")
    set_title(
        figure,
        f"{name}, {label}, {unseen(target)}: worst, middle and best images\n"
        f"({', '.join(colours)}; error: red missed, blue invented; numbers are Dice)",
    )
    for column, place in enumerate(cases.shown):
        for panel, picture in zip(axes[:, column], _case_pictures(cases, column)):
            panel.imshow(picture, interpolation="nearest")
            panel.set_xticks([])
            panel.set_yticks([])
            panel.grid(visible=False)
        dice = 100 * cases.dice[place, cases.occurs].mean()
        axes[0, column].set_title(f"{dice:.0f} %", fontsize=8)
    for panel, text in zip(axes[:, 0], ROWS):
        panel.set_ylabel(text, fontsize=8)
    return figure


def _case_pictures(cases: Cases, column: int) -> tuple[np.ndarray, ...]:
    """The pictures of one image, in the order of ROWS."""
    grey = as_rgb(cases.images[column])
    truth = cases.truth[column].astype(bool)
    predicted = cases.predicted[column].astype(bool)
    errors = error_map(grey, truth, predicted)
    return grey, overlay(grey, truth), overlay(grey, predicted), errors


def as_rgb(image: np.ndarray) -> np.ndarray:
    """uint8 [C, H, W] -> float [H, W, 3] in [0, 1]."""
    _, height, width = image.shape
    colours = np.broadcast_to(image, (3, height, width))
    return colours.transpose(1, 2, 0) / 255


def overlay(grey: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The picture [H, W, 3] with the masks [Q, H, W] in their colours over it."""
    shown = grey.copy()
    for mask, (_, code) in zip(masks, itertools.cycle(COLOURS)):
        colour = np.array(to_rgb(code))
        behind = (1 - OPACITY) * grey[mask]
        shown[mask] = behind + OPACITY * colour
    return shown


def error_map(grey: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """A paler copy of the picture, with wrong pixels in the colours of their errors."""
    shown = 0.5 + 0.5 * grey
    for y, p in zip(truth[::-1], predicted[::-1]):
        shown[y & ~p] = to_rgb(MISSED)
        shown[p & ~y] = to_rgb(INVENTED)
    return shown
