"""Draws the five styles, of which four train and one is unseen, and the accuracy on each, for light and dark screens.

    python docs/drawings_picture.py outputs/drawings/fedavg/openmoji_black

The pictures are docs/figures/drawings.png and docs/site/drawings-dark.png, which the site shows instead of it on a dark
screen. The folder has the runs of one method on one unseen style, one for each seed. The accuracies are those of the
round with the best source validation: on the images that validate, which no client trains on, and on the unseen style.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from fedsim.data.drawings import EMBEDDED, STYLES, listed, sheet_images
from fedsim.records import read_runs

HERE = Path(__file__).parent
LIGHT = {
    "file": HERE / "figures" / "drawings.png",
    "paper": "white",
    "ink": "black",
    "seen": "#0072b2",
    "unseen": "#d55e00",
}
DARK = {
    "file": HERE / "site" / "drawings-dark.png",
    "paper": "#131416",  # the site's own background
    "ink": "#e6e6e6",
    "seen": "#56b4e9",
    "unseen": "#ff8c42",
}
TITLES = {
    "fluent_3d": "Fluent 3D",
    "noto": "Noto",
    "openmoji": "OpenMoji",
    "openmoji_black": "OpenMoji, black",
    "twemoji": "Twemoji",
}
THINGS = (
    "dog_face",
    "grinning_face",
    "red_apple",
    "waving_hand",
    "person_running",
    "bicycle",
    "three_o_clock",
    "octopus",
)


def accuracies(folder: Path) -> dict[str, float]:
    """The mean over the seeds of the accuracy on each style, in the selected round."""
    runs = read_runs(folder)
    sums: dict[str, list[float]] = {}
    for row in runs.summary.itertuples():
        clients = pd.read_csv(folder / row.run / "clients.csv")
        chosen = clients[clients["round"] == row.best_validation_round]
        for client in chosen.itertuples():
            sums.setdefault(client.domain, []).append(client.validation_accuracy)
        sums.setdefault(row.target, []).append(row.best_validation_target_accuracy)
    return {style: sum(values) / len(values) for style, values in sums.items()}


def draw(scores: dict[str, float], target: str, look: dict[str, Any]) -> None:
    """Write the picture in the colours of a look: a row for each style, the unseen one last."""
    names = [row["name"] for row in listed(EMBEDDED)[0]]
    order = [*(style for style in STYLES if style != target), target]
    figure, axes = plt.subplots(
        len(order), len(THINGS) + 2, figsize=(9, 4.6), width_ratios=[3.2, *[1] * len(THINGS), 2.6]
    )
    for line, style in zip(axes, order):
        for axis in line:
            axis.set_axis_off()
        write_texts(line, style, scores[style], style == target, look)
        images = sheet_images(style)
        for axis, thing in zip(line[1:-1], THINGS):
            axis.imshow(images[names.index(thing)].transpose(1, 2, 0))
    figure.text(0.975, 0.955, "accuracy of FedAvg", fontsize=9, color=look["ink"], ha="right")
    figure.subplots_adjust(0.02, 0.02, 0.98, 0.95, 0.05, 0.08)
    figure.savefig(look["file"], dpi=130, facecolor=look["paper"])
    plt.close(figure)


def write_texts(line: Sequence[Axes], style: str, score: float, is_unseen: bool, look: dict[str, Any]) -> None:
    """Write the name and the part of a style before its images, and the accuracy behind them."""
    color = look["unseen"] if is_unseen else look["seen"]
    role = "unseen: no client has it" if is_unseen else "a client trains on it"
    first, last = line[0], line[-1]
    title = {"fontsize": 12, "weight": "bold", "color": look["ink"]}
    first.text(0, 0.62, TITLES[style], va="center", transform=first.transAxes, **title)
    first.text(0, 0.22, role, fontsize=9, color=color, va="center", transform=first.transAxes)
    number = {"fontsize": 16, "weight": "bold", "color": color}
    last.text(0.95, 0.5, f"{100 * score:.0f} %", ha="right", va="center", transform=last.transAxes, **number)


if __name__ == "__main__":
    runs_folder = Path(sys.argv[1])
    means = accuracies(runs_folder)
    for each in (LIGHT, DARK):
        draw(means, runs_folder.name, each)
