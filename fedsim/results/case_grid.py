"""Pictures of segmentations: image, truth, prediction and error of the worst, middle and best images of a target."""

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fedsim.results.cases import Cases
from fedsim.results.figure_style import set_title, unseen, written

COLOURS = (  # of the structures
    ("green", "#1b9e77"), ("orange", "#d95f02"), ("violet", "#7570b3"), ("pink", "#e7298a"), ("lime", "#66a61e"),
    ("yellow", "#e6ab02"),
)  # fmt: skip
MISSED, INVENTED = "#d62728", "#1f77b4"
ROWS = ("image", "truth", "prediction", "error")
OPACITY = 0.55


def case_grid(cases: Cases, name: str, label: str, target: str) -> Figure:
    """A figure with one column for each of the worst, middle and best images by mean Dice.

    Each structure has a colour; later structures are drawn over earlier ones. The row of errors shows, for each pixel,
    the first structure that is wrong there: red where it was missed, blue where it was predicted but is not there.
    """
    count = len(cases.shown)
    figure = Figure(figsize=(1.05 * count + 0.6, 1.05 * len(ROWS) + 1.0), layout="constrained")
    axes = figure.subplots(len(ROWS), count, squeeze=False)
    colours = ", ".join(f"{written(one)} {COLOURS[k % len(COLOURS)][0]}" for k, one in enumerate(cases.structures))
    set_title(
        figure,
        f"{name}, {label}, {unseen(target)}: worst, middle and best images\n"
        f"({colours}; error: red missed, blue invented; numbers are Dice)",
    )
    for column, place in enumerate(cases.shown):
        grey = as_rgb(cases.images[column])
        truth, predicted = cases.truth[column].astype(bool), cases.predicted[column].astype(bool)
        pictures = (grey, overlay(grey, truth), overlay(grey, predicted), error_map(grey, truth, predicted))
        for one, picture in zip(axes[:, column], pictures):
            one.imshow(picture, interpolation="nearest")
            one.set_xticks([])
            one.set_yticks([])
            one.grid(visible=False)
        axes[0, column].set_title(f"{100 * cases.dice[place].mean():.0f} %", fontsize=8)
    for row, text in zip(axes[:, 0], ROWS):
        row.set_ylabel(text, fontsize=8)
    return figure


def as_rgb(image: np.ndarray) -> np.ndarray:
    """uint8 [C, H, W] -> float [H, W, 3] in [0, 1]."""
    return np.broadcast_to(image, (3, *image.shape[1:])).transpose(1, 2, 0) / 255


def overlay(grey: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The picture [H, W, 3] with the masks [Q, H, W] in their colours over it."""
    shown = grey.copy()
    for number, mask in enumerate(masks):
        shown[mask] = (1 - OPACITY) * grey[mask] + OPACITY * np.array(to_rgb(COLOURS[number % len(COLOURS)][1]))
    return shown


def error_map(grey: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """A paler copy of the picture, with wrong pixels in the colours of their errors."""
    shown = 0.5 + 0.5 * grey
    for y, p in reversed(list(zip(truth, predicted))):
        shown[y & ~p] = to_rgb(MISSED)
        shown[p & ~y] = to_rgb(INVENTED)
    return shown
