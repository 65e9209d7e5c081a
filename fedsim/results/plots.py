"""All figures that the records of some runs allow, as PNG and SVG files."""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from fedsim.errors import UserError
from fedsim.results import figures
from fedsim.results.case_grid import case_grid
from fedsim.results.compare import Comparison, compare
from fedsim.results.confusion import confusion_figure, kept_predictions
from fedsim.results.cost_figure import cost_front
from fedsim.results.differences import differing_settings, variant, variant_text
from fedsim.results.figure_style import look
from fedsim.results.reading import Runs, of_experiment
from fedsim.results.report_cases import kept_cases


def plot_all(runs: Runs, out: Path | str, select: str = "best_validation") -> list[Path]:
    """Draws every figure for which the records have the columns; returns the paths of the PNG and SVG files.

    These are learning curves, bars per target, cost fronts, per-client metrics and layer-wise quantities. A figure
    never shows runs of more than one experiment.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    names = list(dict.fromkeys(experiment.name for experiment in runs.experiments.values()))
    with look(names_in(runs)):
        for name in names:
            prefix = f"{_file_name(name)}-" if len(names) > 1 else ""
            for key, figure in draw(of_experiment(runs, name), name, select):
                paths += _save(figure, out / f"{prefix}{_file_name(key)}")
    if not paths:
        raise UserError(f"{runs.folder}: the records hold nothing to plot yet")
    return paths


def draw(runs: Runs, name: str, select: str = "best_validation") -> list[tuple[str, Figure]]:
    """(key, Figure) of one experiment's runs, in the order of a report."""
    label = run_labels(runs)
    rounds, clients, details = (_labelled(frame, label) for frame in (runs.rounds, runs.clients, runs.details))
    found: list[tuple[str, Figure | None]] = []
    if len(rounds):
        found.append(("learning-curves", figures.learning_curves(rounds, name)))
    if len(runs.summary):
        comparison = compare(runs, select, by=list(_differences(runs)), published=False)
        found.append(("target-accuracy", figures.target_bars(comparison, _per_run(runs, comparison, label), name)))
        found.append(("cost", cost_front(comparison, _costs(rounds), name)))
    for key, by_target in kept_predictions(runs, label, select).items() if len(runs.summary) else []:
        found.append((f"confusion-{key}", confusion_figure(by_target, name, key)))
    for key, by_target in kept_cases(runs, label, select).items() if len(runs.summary) else []:
        found += [(f"cases-{key}-{target}", case_grid(own[0], name, key, target)) for target, own in by_target.items()]
    for column in figures.client_metrics(clients) if len(clients) else []:
        found.append((f"client-{column}", figures.metric_over_rounds(clients, column, name)))
    if len(details):
        found += _details(details, name)
    return [(key, figure) for key, figure in found if figure is not None]


def names_in(runs: Runs) -> list[str]:
    """Every name that a figure may write: experiments, labels, targets, clients."""
    targets = [
        target for experiment in runs.experiments.values() for target in (experiment.name, experiment.run.target)
    ]
    clients = runs.clients["client"].unique() if "client" in runs.clients else []
    return list(dict.fromkeys([*targets, *run_labels(runs).values(), *map(str, clients)]))


def run_labels(runs: Runs) -> dict[str, str]:
    """The label of every run, with the settings in which runs of one method differ."""
    everyone, by, labels = list(runs.experiments.values()), list(_differences(runs)), runs.labels()
    texts = {run: variant_text(by, variant(experiment, by, everyone)) for run, experiment in runs.experiments.items()}
    return {run: f"{labels[run]} ({text})" if text else labels[run] for run, text in texts.items()}


def _differences(runs: Runs) -> dict[str, list[str]]:
    return differing_settings(runs.experiments.values())


def _labelled(frame: pd.DataFrame, label: dict[str, str]) -> pd.DataFrame:
    return frame.assign(label=frame["run"].map(label)) if len(frame) else frame


def _per_run(runs: Runs, comparison: Comparison, label: dict[str, str]) -> pd.DataFrame:
    table = _labelled(runs.summary, label)
    return table.assign(accuracy=table[f"{comparison.select}_target_{comparison.metric}"])


def _costs(rounds: pd.DataFrame) -> pd.DataFrame:
    """Gigabytes and minutes of one whole run, as means over the runs of a label."""
    columns = [column for column in ("bytes_down", "bytes_up", "round_seconds") if column in rounds]
    totals = rounds.groupby(["label", "run"])[columns].sum(min_count=1).groupby("label").mean()
    totals = totals.reindex(columns=["bytes_down", "bytes_up", "round_seconds"])
    return pd.DataFrame(
        {"gigabytes": (totals["bytes_down"] + totals["bytes_up"]) / 1e9, "minutes": totals["round_seconds"] / 60}
    )


def _details(details: pd.DataFrame, name: str) -> list[tuple[str, Figure]]:
    found = []
    for (label, quantity), frame in details.groupby(["label", "quantity"], sort=False):
        found.append((f"{quantity}-{label}", figures.detail_over_rounds(frame, name, label, quantity)))
        if "alpha" in quantity:
            found.append((f"{quantity}-{label}-histogram", figures.detail_histogram(frame, name, label, quantity)))
    return found


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", text).strip("_")


def _save(figure: Figure, stem: Path) -> list[Path]:
    kinds: dict[str, Callable[[Path], None]] = {
        ".png": lambda path: figure.savefig(path, dpi=150, facecolor="white"),
        ".svg": lambda path: figure.savefig(path, facecolor="white", metadata={"Date": None}),
    }
    paths = []
    for suffix, write in kinds.items():
        path = stem.with_name(stem.name + suffix)
        write(path)
        paths.append(path)
    return paths
