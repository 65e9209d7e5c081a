"""How a run looks in a notebook: a bar while it is computed, and then its result with a table and a curve."""

import html
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedsim.common.tasks import Task, scores, task_in, task_of
from fedsim.settings.experiment import Experiment

WIDTH, HEIGHT, MARGIN = 420, 160, 28  # pixels of the curve
COLOURS = {"validation": "#d55e00", "target": "#0072b2"}
SHOWN = ("round", "train_loss", "mean_validation_{}", "target_{}", "clients", "round_seconds")
MOST_ROWS = 5


class NotebookBar:
    """Callback that shows the progress of a run as one output of a notebook's cell, which it changes each round."""

    def __init__(self) -> None:
        self._output: Any = None
        self._title, self._rounds = "", 1

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Show the bar."""
        from IPython.display import HTML, display

        self._title = f"{experiment.method_name} → {experiment.run.target} (seed {experiment.run.seed})"
        self._rounds = experiment.train.rounds
        self._output = display(HTML(self._html(0, "starting")), display_id=True)

    def on_round(self, row: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Show the new round."""
        from IPython.display import HTML

        task = task_in(row)
        shown = ", ".join(f"{name} {task.text(value)}" for name, value in scores(row))
        self._output.update(HTML(self._html(row["round"], shown)))

    def on_end(self, summary: dict[str, Any]) -> None:
        """Leave the bar as it is."""

    def _html(self, done: int, text: str) -> str:
        bar = f'<progress value="{done}" max="{self._rounds}"></progress>'
        return f"{html.escape(self._title)} {bar} {done}/{self._rounds} {html.escape(text)}"


def run_html(rounds: pd.DataFrame, headline: str) -> str:
    """A run's result in lines, the curve of its rounds, and a table of the last ones."""
    lines = "<br>".join(html.escape(line) for line in headline.splitlines())
    metric = task_of(rounds).metric
    names = [name.format(metric) for name in SHOWN]
    columns = [name for name in names if name in rounds and rounds[name].notna().any()]
    table = rounds[columns].tail(MOST_ROWS).to_html(index=False, border=0, float_format=lambda value: f"{value:.4g}")
    return f"<div><p>{lines}</p>{curve(rounds)}{table}</div>"


def curve(rounds: pd.DataFrame) -> str:
    """An SVG of the primary metric by round, in the validation of the sources and on the unseen domain."""
    task = task_of(rounds)
    metric = task.metric
    columns = {"validation": f"mean_validation_{metric}", "target": f"target_{metric}"}
    last = max(int(rounds["round"].max()), 1)
    most = 1.0 if task.is_fraction else _greatest(rounds, list(columns.values()))
    parts = [_axes(last, task, most)]
    for place, (name, column) in enumerate(columns.items()):
        if column not in rounds:
            continue
        points = rounds[["round", column]].dropna().itertuples(index=False)
        path = " ".join(f"{_x(number, last):.1f},{_y(value / most):.1f}" for number, value in points)
        colour, at = COLOURS[name], MARGIN + 110 * place
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{at}" y="12" fill="{colour}">{name if name == "validation" else "unseen domain"}</text>'
        )
    style = 'style="font:11px sans-serif"'
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" {style}>{"".join(parts)}</svg>'


def _greatest(rounds: pd.DataFrame, columns: list[str]) -> float:
    """The greatest value of these columns, at which the axis ends; 1 without any."""
    values = rounds[[column for column in columns if column in rounds]].to_numpy(dtype=float)
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def _x(number: float, last: int) -> float:
    """The place of a round."""
    return MARGIN + (WIDTH - 2 * MARGIN) * number / last


def _y(value: float) -> float:
    """The place of a fraction."""
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value


def _axes(last: int, task: Task, most: float) -> str:
    """The frame of the curve, with its numbers up to `most`."""
    metric = task.metric
    lines = ""
    for value in (0.0, 0.5, 1.0):
        at = _y(value)
        text = f"{100 * value:.0f}%" if task.is_fraction else f"{most * value:.3g}"
        lines += f'<path d="M{MARGIN} {at:.1f} H{WIDTH - MARGIN}" stroke="#8888" stroke-width="0.5"/>'
        lines += f'<text x="2" y="{at + 4:.1f}" fill="#888">{text}</text>'
    label = f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 8}" text-anchor="end" fill="#888">{metric}, round {last}</text>'
    return f"<title>{metric} by round</title>{lines}{label}"
