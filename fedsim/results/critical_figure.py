"""The critical-difference figure: methods on an axis of mean ranks, with bars over those that do not differ."""

from matplotlib.figure import Figure

from fedsim.results.across import LEVEL, Pairs
from fedsim.results.figure_style import COLORS, set_title, written

STEP = 0.36  # inches between two names


def critical_figure(found: Pairs, name: str) -> Figure:
    """Mean ranks, the best at the left (Demšar, JMLR 2006); a bar joins methods of which no two differ.

    We join by Wilcoxon's test with Holm's correction, as Benavoli et al. (JMLR 2016) advise, not by Nemenyi's distance.
    """
    ranks, bars = found.ranks, found.groups
    half = -(-len(ranks) // 2)
    top, height = len(bars) + 1, half + len(bars) + 1
    figure = Figure(figsize=(7.5, STEP * height + 1.1), layout="constrained")
    axes = figure.subplots()
    set_title(figure, f"{name}: mean rank over {found.blocks} unseen domains\n(joined: no pair differs, Holm, {LEVEL})")
    low, high = int(ranks.min()), max(-int(-ranks.max() // 1), int(ranks.min()) + 1)
    for place, (label, rank) in enumerate(ranks.items()):
        left = place < half
        row = top + (place if left else len(ranks) - 1 - place)
        end = low - 0.06 * (high - low) if left else high + 0.06 * (high - low)
        axes.plot([rank, rank, end], [0, row, row], color="#666666", linewidth=0.9, zorder=1)
        side = "right" if left else "left"
        axes.text(end, row, f" {written(str(label))} ({rank:.2f}) ", ha=side, va="center")
    for number, group in enumerate(bars, 1):
        ends = ranks[group[0]], ranks[group[-1]]
        axes.plot(ends, [number, number], color=COLORS[0], linewidth=4, solid_capstyle="round", zorder=2)
    axes.set_ylim(height, 0)
    axes.set_xlim(low, high)
    axes.xaxis.tick_top()
    axes.set_xticks(range(low, high + 1))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.spines["top"].set_visible(True)
    axes.set_yticks([])
    axes.grid(visible=False)
    return figure
