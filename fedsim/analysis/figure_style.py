"""The style of figures: colours that colour-blind readers can distinguish, line styles and hatches for greyscale."""

import logging
import textwrap
import unicodedata
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsim.analysis.fonts import fonts_for
from fedsim.settings.run import NO_TARGET

# Okabe and Ito's palette, with grey instead of its yellow, which is hard to see on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#808080")
LINES = (
    "-",
    "--",
    "-.",
    ":",
    (0, (7, 2)),
    (0, (4, 1, 1, 1, 1, 1)),
    (0, (1, 2.5)),
)
FIXED = {"fedavg": 14, "deepall": 15}  # the styles of the two rows that most tables have, with the last two colours
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "---", "+++", "**")
SETTINGS: Any = {  # matplotlib names the type of its settings nowhere in public
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "figure.titlesize": 11,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.7,
    "hatch.linewidth": 0.6,
    "axes.axisbelow": True,
    # Fixed ids and no date: the same records give the same SVG bytes.
    "svg.hashsalt": "fedsim",
}


MOST_NAME = 28  # letters of a name in a figure
MOST_NAME_LINES = 3


@contextmanager
def look(names: Iterable[str] = ()) -> Iterator[None]:
    """Use the figures' settings inside a `with` block, with fonts that can write these names.

    Characters that no font has are drawn as boxes. matplotlib would warn of each; these warnings are hidden, because
    `fonts.missing_text` reports all such characters in one line.
    """
    families, _ = fonts_for(names)
    with mpl.rc_context({**SETTINGS, "font.family": families}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        finder = logging.getLogger("matplotlib.font_manager")
        level = finder.level
        finder.setLevel(logging.ERROR)  # hides a message about the normal weight of each family
        try:
            yield
        finally:
            finder.setLevel(level)


def written(name: str, most: int = MOST_NAME) -> str:
    """A name as it is written in a figure: long names are shortened in the middle, and a dollar sign is escaped."""
    short = name
    if len(name) > most:
        start = most * 2 // 3
        end = len(name) - (most // 3 - 1)
        short = f"{name[:start]}…{name[end:]}"
    return short.replace("$", r"\$")


def unseen(target: str) -> str:
    """Return the title of a target's panel."""
    if target == NO_TARGET:
        return "no unseen domain"
    return f"unseen: {written(target, 18)}"


def wrapped(name: str) -> str:
    """A name in up to three lines, so that the settings in it stay whole; only words that fill a line are shortened."""
    text = " ".join(written(word) for word in name.split())
    lines = textwrap.wrap(text, MOST_NAME, break_long_words=False, break_on_hyphens=False)
    if len(lines) > MOST_NAME_LINES:
        first_lines = lines[: MOST_NAME_LINES - 1]
        lines = [*first_lines, f"… {lines[-1]}"]
    return "\n".join(lines)


def lines_of(texts: Iterable[str]) -> int:
    """The number of lines of the text that has most."""
    return max((text.count("\n") + 1 for text in texts), default=1)


def width_of(text: str) -> int:
    """Width of a text's widest line in letters; an East Asian character is as wide as two."""
    widest = 0
    for line in text.split("\n"):
        wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in line)
        widest = max(widest, len(line) + wide)
    return widest


@dataclass(frozen=True)
class Style:
    """Colour, line style, marker and hatch of one method, client or layer group."""

    color: str
    line: Any
    marker: str
    hatch: str


Looks = Mapping[str, Style]  # by label: a method looks the same in all figures of an experiment


def places(names: Iterable[str]) -> dict[str, int]:
    """{name: the number of its style}, in figures and in the report; a name may come several times.

    FedAvg is black and solid, DeepAll grey and dashed, and no other method has one of these two colours.
    """
    reserved = {number % len(COLORS) for number in FIXED.values()}
    numbers = (number for number in count() if number % len(COLORS) not in reserved)
    return {name: FIXED[name] if name in FIXED else next(numbers) for name in dict.fromkeys(names)}


def styles(names: Iterable[str]) -> dict[str, Style]:
    """One style per name. Colours and lines repeat after different numbers, so that the first 42 styles all differ."""
    looks = {}
    for name, number in places(names).items():
        looks[name] = Style(
            color=COLORS[number % len(COLORS)],
            line=LINES[number % len(LINES)],
            marker=MARKERS[number % len(MARKERS)],
            hatch=HATCHES[number % len(HATCHES)],
        )
    return looks


def panels(rows: int, heads: Sequence[str], title: str) -> tuple[Figure, np.ndarray]:
    """(a figure of panels with room for all labels, the array of its axes); heads: the titles of the columns."""
    columns = len(heads)
    width = max(2.5 * columns + 0.6, 5.2)
    height = 2.3 * rows + 0.9
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False)
    set_title(figure, title)
    for one, head in zip(axes[0], heads):
        one.set_title(head)
    return figure, axes


def set_title(figure: Figure, text: str) -> None:
    """Set the title, broken into lines that fit the figure's width."""
    width = int(11 * figure.get_figwidth())
    text = text.replace("$", r"\$")
    if width_of(text) > len(text):  # textwrap counts letters
        width //= 2
    lines = []
    for part in text.split("\n"):
        lines += textwrap.wrap(part, width)
    figure.suptitle("\n".join(lines))


def band(
    axes: Axes,
    frame: pd.DataFrame,
    column: str,
    style: Style,
    label: str,
    scale: float = 1.0,
    rounds: Collection[int] = (),
) -> None:
    """Draw the mean over seeds per round as a line, with a band of one sample standard deviation.

    A single seed has no band. rounds: those in which there can be a value. Where a value is missing (a client that was
    not drawn), the line is interrupted; every value of such a line has a marker, because a value without a neighbour
    would be invisible.
    """
    by_round = frame.dropna(subset=[column]).groupby("round")
    values = scale * by_round[column].agg(["mean", "std"])
    if values.empty:
        return
    first = values.index[0]
    last = values.index[-1]
    inside = [number for number in sorted(rounds) if first <= number <= last]
    broken = len(inside) > len(values)
    every = 1 if broken else max(1, len(values) // 6)
    if broken:
        values = values.reindex(inside)
    axes.plot(
        values.index,
        values["mean"],
        color=style.color,
        linestyle=style.line,
        marker=style.marker,
        markevery=every,
        markersize=2.2 if broken else 3.5,
        label=label,
    )
    spread = values["std"].fillna(0.0)  # no band is drawn where the mean is missing too
    if (spread > 0).any():
        axes.fill_between(
            values.index, values["mean"] - spread, values["mean"] + spread, color=style.color, alpha=0.15, linewidth=0
        )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def legend_below(figure: Figure, names: Iterable[str]) -> None:
    """Draw one legend for all axes under the figure, outside of the plotted area, in the order of `names`."""
    entries = _entries(figure.axes, names)
    if not entries:
        return
    texts = [wrapped(name) for name in entries]
    width = 0.75 + 0.08 * max(map(width_of, texts))
    room = int(figure.get_figwidth() // width)
    columns = max(1, min(len(entries), room))
    rows = -(-len(entries) // columns)
    # The page grows by the lines of the legend, so that the panels keep their height.
    height = 0.05 + 0.14 * lines_of(texts)
    figure.set_figheight(figure.get_figheight() + height * rows - 0.19)
    figure.legend(
        entries.values(),
        texts,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3.2,
    )


def legend_right(row: Sequence[Axes], names: Iterable[str]) -> None:
    """Draw the legend of one row of panels, right of its last panel, for figures whose rows have different entries."""
    entries = _entries(row, names)
    row[-1].legend(
        entries.values(),
        [wrapped(name) for name in entries],
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        frameon=False,
        handlelength=3.0,
    )


def _entries(axes: Iterable[Axes], names: Iterable[str]) -> dict[str, Any]:
    # Every panel lacks some entries (its unseen domain is not a client), so the entries of all panels are collected.
    entries: dict[str, Any] = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles))
    return {name: entries[name] for name in names if name in entries}
