"""One HTML page that holds everything about some runs: results, charts, costs, disclosure, settings, commands."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedsim.common.files import atomic_write, drawn
from fedsim.common.tables import MISSING, percent
from fedsim.common.tasks import task_of
from fedsim.results import combinations, markup
from fedsim.results.cases import Cases, read_cases
from fedsim.results.compare import compare, run_labels
from fedsim.results.comparison import (
    MARKS,
    Comparison,
    accuracy_cells,
    further_cells,
    further_columns,
    published_cells,
    shown_label,
)
from fedsim.results.differences import comparable_settings, differing_settings, value_text
from fedsim.results.markup import Data
from fedsim.results.metrics import kept
from fedsim.results.notes import part_notes
from fedsim.results.reading import Runs, of_experiment, read_runs, run_environment, run_folder
from fedsim.results.report_costs import Notes, costs_section, megabytes
from fedsim.results.report_data import Json, chart_data, run_data
from fedsim.results.report_metrics import accuracy_data, more_than_accuracy, segmentation
from fedsim.results.selection import RULES
from fedsim.settings.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECIPE = ("recipe", "defaults")  # of environment.json, which are no part of an environment
RULE_HEADS = {"best_validation": "best validation", "last": "last round", "oracle": "ORACLE (upper bound)"}


def write_report(
    folder: Path | str,
    notes: Notes | None = None,
    runs: Runs | None = None,
    by: Sequence[str] = (),
) -> Path:
    """Write `report.html` into `folder` (outputs/, an experiment's or a run's folder) and return its path.

    A part of the runs (`choose_runs`) has a page of its own, `report-part.html`.

    notes: texts per method, e.g. {"ccst": {"discloses": "channel statistics", "paper": "..."}}; each inner key becomes
    a column. The text `group` also stands in the table of results, by which its rows can be chosen.
    runs: those of the folder's runs that the report is about; by default all finished ones.
    by: settings in which an experiment's runs are meant to differ, as for `compare`, which refuses other differences.
    """
    runs = runs or read_runs(folder)
    path = Path(folder) / ("report-part.html" if runs.only else "report.html")
    atomic_write(path, report_page(runs, notes or {}, by))
    return path


def report_page(runs: Runs, notes: Notes, by: Sequence[str] = (), live: str = "") -> str:
    """The page as text. live: HTML before the tables, which the server of the page changes."""
    names = sorted({experiment.name for experiment in runs.experiments.values()})
    links = "".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names)
    head = [
        f"<h1>fedsim: {escape(', '.join(names))}</h1>",
        f'<p class="soft">{premise(runs)}</p>',
        f'<p class="soft">{escape(" ".join(part_notes(runs.only)))}</p>' if runs.only else "",
        f"<nav>{links}</nav>" if len(names) > 1 else "",
        live,
    ]
    data: Json = {"experiments": [], "runs": []}
    sections = [_experiment(of_experiment(runs, name), name, notes, by, data) for name in names]
    return markup.page(f"fedsim report: {', '.join(names)}", "\n".join([*head, *sections]), data, live=bool(live))


def premise(runs: Runs) -> str:
    """What all numbers have in common; methods that train on the unseen domain are tested on its other images."""
    used = runs.summary.get("uses_target_unlabelled", pd.Series(dtype=str))
    if not (used.astype(str) == "True").any():
        return "Domain generalization: every number was measured on a domain that no client held."
    return (
        "Domain generalization: every number was measured on images of a domain that no client held; "
        f"methods with {MARKS['uses_target_unlabelled']} trained on other images of that domain, without labels."
    )


def _experiment(runs: Runs, name: str, notes: Notes, by: Sequence[str], data: Json) -> str:
    """The section of an experiment; what its charts and the pages of its runs show is added to `data`.

    Methods are tested against fedavg where there are runs of it.
    """
    baseline = "fedavg" if "fedavg" in run_labels(runs, by).values() else ""
    comparison = compare(runs, baseline=baseline, by=by)
    apart, shared = settings_apart(runs)
    groups = {method: own.get("group", "") for method, own in notes.items()}
    chart = len(data["experiments"])
    pages = {run: place for place, run in enumerate(runs.summary["run"], len(data["runs"]))}
    data["experiments"].append(chart_data(runs, comparison, groups, pages))
    data["runs"] += run_data(runs, comparison, shared)
    cases = kept(runs, comparison.labels, comparison.select, read_cases)
    parts = [
        f'<section id="{escape(name)}"><h2>{escape(comparison.title)}</h2>',
        _results(comparison, groups, pages),
        markup.bullets(comparison.notes),
        "<h3>Figures</h3>",
        f'<div class="charts" data-experiment="{chart}"></div>',
        *pictures(runs, name, cases),
        more_than_accuracy(runs, comparison, by),
        segmentation(cases),
        combinations.section(runs),
        "<h3>Cost and disclosure</h3>",
        costs_section(runs, comparison, notes),
        "<h3>Every run</h3>",
        _every_run(runs, comparison.labels, pages),
        "<h3>Settings</h3>",
        settings_section(apart, shared),
        "<h3>Environment</h3>",
        _environments(runs),
        "<h3>Run it again</h3>",
        _commands([data["runs"][page]["command"] for page in pages.values()]),
        "</section>",
    ]
    return "\n".join(parts)


def _results(comparison: Comparison, groups: Mapping[str, str], pages: Mapping[str, int]) -> str:
    """The main table; a cell leads to the page of its run, the first of its seeds."""
    cells, further = accuracy_cells(comparison), further_columns(comparison)
    grouped = any(groups.values())
    costs = [f"{head} (MB)" if key.startswith("bytes_") else head for key, head in further.items()]
    heads = ["Method", *["Changes"] * grouped, *comparison.targets, "Average", *costs]
    first = comparison.table.sort_values("seed").drop_duplicates(["label", "target"])
    page = {(row.label, row.target): f"#run={pages[row.run]}" for row in first.itertuples()}
    rows: list[markup.Cells] = []
    for _, row in comparison.methods.iterrows():
        group = Data(groups.get(row["method"], ""), style="words")
        accuracies = [
            accuracy_data(cell, page.get((row["label"], target), ""))
            for cell, target in zip(cells[row["label"]], comparison.columns)
        ]
        rows.append([shown_label(row), *[group] * grouped, *accuracies, *_further(comparison, row)])
    below: list[markup.Cells] = [
        [label, *[""] * grouped, *map(accuracy_data, printed), *[""] * len(further)]
        for label, printed in published_cells(comparison)
    ]
    return markup.table(heads, rows, below, style="methods")


def _further(comparison: Comparison, row: pd.Series) -> list[Data]:
    """The cells that follow the accuracies, with the numbers by which they are sorted."""
    cells = []
    for key, cell in zip(further_columns(comparison), further_cells(comparison, row), strict=True):
        value = math.nan if pd.isna(row[key]) else float(row[key])
        cells.append(megabytes(value) if key.startswith("bytes_") else Data(cell.text, cell.value))
    return cells


def pictures(runs: Runs, name: str, cases: Mapping[str, Mapping[str, Sequence[Cases]]]) -> list[str]:
    """What remains a picture: combination searches, segmented images, and the t-SNE that `fedsim features` has drawn.

    The last ones are PNG: SVG of so many points is large.
    """
    files = [(run, file) for run in runs.experiments for file in run_folder(runs, run).glob("plots/features-*.png")]
    found = [
        markup.picture(file.read_bytes(), f"t-SNE of features by class and by domain: {run}", 11, "png")
        for run, file in files
    ]
    searches = combinations.searches_of(runs)
    if not cases and not searches:
        return found  # without matplotlib, which takes a second to import
    from fedsim.results.case_grid import case_grid
    from fedsim.results.figure_style import look

    with look([name, *cases, *runs.summary["target"]]):
        found += [_drawn(figure) for _, figure in combinations.figures(searches, name)]
        grids = [
            _drawn(case_grid(own[0], name, label, target))
            for label, targets in cases.items()
            for target, own in targets.items()
        ]
    folded = markup.folded("Segmented images, one figure per method and target", "\n".join(grids))
    return found + [folded] * bool(grids)


def _drawn(figure: "Figure") -> str:
    content = drawn(figure, "svg", facecolor="white", metadata={"Date": None})
    return markup.picture(content, figure.get_suptitle().replace("\n", " "), figure.get_figwidth())


def _every_run(runs: Runs, labels: Mapping[str, str], pages: Mapping[str, int]) -> str:
    metric = task_of(runs.summary, "last_target_").metric
    heads = ["Run", "target", "seed"]
    for rule in RULES:
        heads += [f"{RULE_HEADS[rule]} (%)", "at round"]
    rows: list[markup.Cells] = []
    for _, row in runs.summary.iterrows():
        run = Data(labels[row["run"]], link=f"#run={pages[row['run']]}")
        cells: list[Data | str] = [run, row["target"], Data(str(row["seed"]), int(row["seed"]))]
        for rule in RULES:
            value, round_ = row[f"{rule}_target_{metric}"], row[f"{rule}_round"]
            cells += [Data(percent(value), 100 * value), Data(MISSING if pd.isna(round_) else f"{round_:.0f}", round_)]
        rows.append(cells)
    left = [f"Unfinished and therefore left out: {run}" for run in runs.unfinished]
    return markup.table(heads, rows) + (markup.bullets(left) if left else "")


def settings_apart(runs: Runs) -> tuple[dict[str, str], dict[str, str]]:
    """(the settings in which runs differ, with all their values; those that all runs share)."""
    everyone: list[Experiment] = list(runs.comparable.values())
    apart = {key: " | ".join(values) for key, values in differing_settings(everyone, between_methods=True).items()}
    shared = {
        key: value_text(value)
        for key, value in comparable_settings(everyone[0]).items()
        if not key.startswith("method.") and key not in apart
    }
    methods: dict[str, list[str]] = {}
    for experiment in everyone:
        for key, value in comparable_settings(experiment).items():
            if key.startswith("method."):
                methods.setdefault(f"{experiment.method_name}: {key}", []).append(value_text(value))
    apart |= {key: " | ".join(dict.fromkeys(values)) for key, values in methods.items()}
    return apart, shared


def settings_section(apart: Mapping[str, str], shared: Mapping[str, str]) -> str:
    """The settings that all runs share, and those in which they differ."""
    text = markup.key_values(apart, ("setting that differs", "values")) if apart else ""
    return text + markup.folded("Settings that all runs share", markup.key_values(shared))


def _environments(runs: Runs) -> str:
    """Each distinct environment once, with the number of runs that had it."""
    tables = (run_environment(runs, run) for run in runs.experiments)
    found = Counter(json.dumps({key: own for key, own in table.items() if key not in RECIPE}) for table in tables)
    parts = []
    for text, count in found.items():
        table: dict[str, Any] = json.loads(text)
        packages = table.pop("packages", {})
        parts.append(
            markup.folded(
                f"{count} of {len(runs.experiments)} runs: {table.get('platform', 'not recorded')}",
                markup.key_values(table | packages, ("what", "value")),
                is_open=len(found) == 1,
            )
        )
    return "\n".join(parts)


def _commands(lines: Sequence[str]) -> str:
    hint = (
        '<p class="soft">There is one line per run. Set FEDSIM_DATA (or data.root) to the folder of the data sets.'
        " Finished runs are not repeated; add --output FOLDER if these runs are still in outputs/. "
        "The numbers are the same on the same machine and runtime.</p>"
    )
    return hint + f"<pre>{escape(chr(10).join(lines))}</pre>"
