"""One HTML page that holds everything about some runs: results, figures, costs, disclosure, settings, commands."""

import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.common.console import counted
from fedsim.common.files import atomic_write
from fedsim.common.tasks import task_of
from fedsim.results import combinations, markup
from fedsim.results.cell_texts import (
    MISSING,
    CellText,
    accuracy_cells,
    amount,
    further_cells,
    further_columns,
    further_values,
    percent,
    published_cells,
    shown_label,
)
from fedsim.results.compare import Comparison, compare
from fedsim.results.differences import comparable_settings, differing_settings, value_text
from fedsim.results.figure_style import look
from fedsim.results.fonts import fonts_for, missing_text
from fedsim.results.markup import Data
from fedsim.results.notes import MARKS, part_notes
from fedsim.results.plots import draw, names_in, run_labels
from fedsim.results.reading import Runs, of_experiment, read_runs, run_environment, run_folder
from fedsim.results.report_cases import kept_cases, segmentation
from fedsim.results.report_metrics import accuracy_data, more_than_accuracy
from fedsim.results.reproduce import command_line
from fedsim.results.selection import RULES
from fedsim.settings.experiment import Experiment

Notes = Mapping[str, Mapping[str, str]]
BYTES_NOTE = (
    "Bytes per round are sums over the clients of a round, mean over the rounds from 1 on. What comes before round 1 "
    "(a first model or style of each client) is in clients.csv under round 0 and in the figure of costs."
)
RECIPE = ("recipe", "defaults")  # of environment.json, which are no part of an environment
RULE_HEADS = {"best_validation": "best validation", "last": "last round", "oracle": "ORACLE (upper bound)"}


def write_report(
    folder: Path | str,
    notes: Notes | None = None,
    select: str = "best_validation",
    baseline: str | None = None,
    runs: Runs | None = None,
    by: Sequence[str] = (),
) -> Path:
    """Write `report.html` into `folder` (outputs/, an experiment's or a run's folder) and return its path.

    A part of the runs (`choose_runs`) has a page of its own, `report-part.html`.

    notes: texts per method, e.g. {"ccst": {"discloses": "channel statistics", "paper": "..."}}; each inner key becomes
    a column.
    baseline: method that the others are tested against; by default fedavg where there are runs of it.
    runs: those of the folder's runs that the report is about; by default all finished ones.
    by: settings in which an experiment's runs are meant to differ, as for `compare`, which refuses other differences.
    """
    runs = runs or read_runs(folder)
    names = sorted({experiment.name for experiment in runs.experiments.values()})
    links = "".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names)
    head = [
        f"<h1>fedsim: {escape(', '.join(names))}</h1>",
        f'<p class="soft">{premise(runs)}</p>',
        f'<p class="soft">{escape(" ".join(part_notes(runs.only)))}</p>' if runs.only else "",
        f"<nav>{links}</nav>" if len(names) > 1 else "",
    ]
    sections = [_experiment(of_experiment(runs, name), name, notes or {}, select, baseline, by) for name in names]
    path = Path(folder) / ("report-part.html" if runs.only else "report.html")
    atomic_write(path, markup.page(f"fedsim report: {', '.join(names)}", "\n".join([*head, *sections])))
    return path


def premise(runs: Runs) -> str:
    """What all numbers have in common; methods that train on the unseen domain are tested on its other images."""
    used = runs.summary.get("uses_target_unlabelled", pd.Series(dtype=str))
    if not (used.astype(str) == "True").any():
        return "Domain generalization: every number was measured on a domain that no client held."
    return (
        "Domain generalization: every number was measured on images of a domain that no client held; "
        f"methods with {MARKS['uses_target_unlabelled']} trained on other images of that domain, without labels."
    )


def _experiment(runs: Runs, name: str, notes: Notes, select: str, baseline: str | None, by: Sequence[str]) -> str:
    labels = run_labels(runs, by)
    if baseline is None:
        baseline = "fedavg" if "fedavg" in labels.values() else ""
    comparison = compare(runs, select, baseline, by)
    parts = [
        f'<section id="{escape(name)}"><h2>{escape(comparison.title)}</h2>',
        _results(comparison),
        markup.bullets(comparison.notes),
        more_than_accuracy(runs, comparison, by),
        segmentation(kept_cases(runs, labels, comparison.select)),
        "<h3>Figures</h3>",
        _figures(runs, name, comparison, by),
        combinations.section(runs),
        "<h3>Cost and disclosure</h3>",
        _costs(runs, comparison, notes, labels),
        "<h3>Every run</h3>",
        _every_run(runs, labels),
        "<h3>Settings</h3>",
        settings_section(runs),
        "<h3>Environment</h3>",
        _environments(runs),
        "<h3>Run it again</h3>",
        _commands(runs),
        "</section>",
    ]
    return "\n".join(parts)


def _results(comparison: Comparison) -> str:
    cells, columns = accuracy_cells(comparison), [*comparison.targets, "average"]
    heads = ["Method", *comparison.targets, "Average", *further_columns(comparison)]
    rows: list[markup.Cells] = []
    for _, row in comparison.methods.iterrows():
        own = cells[row["label"]]
        rows.append([shown_label(row), *(accuracy_data(own[target]) for target in columns), *_further(comparison, row)])
    below: list[markup.Cells] = [
        [
            f"{label} ({source}, published)",
            *(accuracy_data(values.get(target, CellText(MISSING))) for target in columns),
            *[""] * len(further_columns(comparison)),
        ]
        for label, source, values in published_cells(comparison)
    ]
    return markup.table(heads, rows, below)


def _further(comparison: Comparison, row: pd.Series) -> list[Data]:
    pairs = zip(further_cells(comparison, row), further_values(comparison, row), strict=True)
    return [Data(text, value) for text, value in pairs]


def _figures(runs: Runs, name: str, comparison: Comparison, by: Sequence[str]) -> str:
    pictures: list[str] = []
    confusions: list[str] = []
    cases: list[str] = []
    names = names_in(runs, by)
    boxes = missing_text(fonts_for(names)[1])
    with look(names):
        for key, figure in counted(draw(runs, name, comparison, by), "figures drawn:"):
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
            title = figure.get_suptitle().replace("\n", " ")
            place = {"confusion": confusions, "cases": cases}.get(key.partition("-")[0], pictures)
            place.append(markup.picture(buffer.getvalue(), title, figure.get_figwidth()))
    if confusions:
        pictures.append(markup.folded("Confusion matrices, one figure per method", "\n".join(confusions)))
    if cases:
        pictures.append(markup.folded("Segmented images, one figure per method and target", "\n".join(cases)))
    return "\n".join([markup.bullets([boxes]) if boxes else "", *pictures, *_feature_pictures(runs)])


def _feature_pictures(runs: Runs) -> list[str]:
    """The pictures that `fedsim features` has drawn of the runs' models, as PNG: SVG of so many points is large."""
    files = [(run, file) for run in runs.experiments for file in run_folder(runs, run).glob("plots/features-*.png")]
    return [
        markup.picture(file.read_bytes(), f"t-SNE of features by class and by domain: {run}", 11, "png")
        for run, file in files
    ]


def _costs(runs: Runs, comparison: Comparison, notes: Notes, labels: Mapping[str, str]) -> str:
    """A table of bytes per round by record, seconds per round, and the texts that were given per method."""
    records = [column for column in runs.clients if column.startswith(("bytes_down_", "bytes_up_"))]
    texts = list(dict.fromkeys(key for method in comparison.methods["method"] for key in notes.get(method, {})))
    heads = [
        "Method",
        "down/round",
        "up/round",
        *(_record_head(column) for column in records),
        "s/round",
        *(text.replace("_", " ") for text in texts),
    ]
    by_record = _record_bytes(runs, records, labels)
    rows: list[markup.Cells] = []
    for _, row in comparison.methods.iterrows():
        sizes = [
            row["bytes_down_per_round"],
            row["bytes_up_per_round"],
            *(by_record.get((row["label"], column), float("nan")) for column in records),
        ]
        seconds, own = row["seconds_per_round"], notes.get(row["method"], {})
        rows.append(
            [
                shown_label(row),
                *(Data(amount(size), size) for size in sizes),
                Data(MISSING if pd.isna(seconds) else f"{seconds:.1f}", seconds),
                *(Data(own.get(text, ""), style="long") for text in texts),
            ]
        )
    return markup.table(heads, rows) + markup.bullets([BYTES_NOTE])


def _record_head(column: str) -> str:
    _, direction, record = column.split("_", 2)
    return f"{record} {direction}"


def _record_bytes(runs: Runs, records: list[str], labels: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Bytes per round of each record. As in the totals, round 0, which comes before training, is not counted."""
    if not records:
        return {}
    clients = runs.clients.assign(label=runs.clients["run"].map(labels))
    trained = clients[clients["round"] >= 1]
    # A record that is not sent in a round counts zero bytes there, so that the records add up to the total.
    sums = trained.groupby(["label", "run", "round"])[records].sum()
    sums = sums.groupby(["label", "run"]).mean().groupby("label").mean()
    return {(str(label), column): value for column in records for label, value in sums[column].items() if value > 0}


def _every_run(runs: Runs, labels: Mapping[str, str]) -> str:
    metric = task_of(runs.summary, "last_target_").metric
    heads = ["Run", "target", "seed"]
    for rule in RULES:
        heads += [f"{RULE_HEADS[rule]} (%)", "at round"]
    rows: list[markup.Cells] = []
    for _, row in runs.summary.iterrows():
        cells: list[Data | str] = [labels[row["run"]], row["target"], Data(str(row["seed"]), int(row["seed"]))]
        for rule in RULES:
            value, round_ = row[f"{rule}_target_{metric}"], row[f"{rule}_round"]
            cells += [Data(percent(value), value), Data(MISSING if pd.isna(round_) else f"{round_:.0f}", round_)]
        rows.append(cells)
    left = [f"Unfinished and therefore left out: {run}" for run in runs.unfinished]
    return markup.table(heads, rows) + (markup.bullets(left) if left else "")


def settings_section(runs: Runs) -> str:
    """The settings that all runs share, and those in which they differ."""
    everyone: list[Experiment] = list(runs.comparable.values())
    own = {key for experiment in everyone for key in comparable_settings(experiment) if key.startswith("method.")}
    apart = {key: " | ".join(values) for key, values in differing_settings(everyone, between_methods=True).items()}
    shared = {
        key: value_text(value)
        for key, value in comparable_settings(everyone[0]).items()
        if key not in own and key not in apart
    }
    methods: dict[str, list[str]] = {}
    for experiment in everyone:
        for key, value in comparable_settings(experiment).items():
            if key in own:
                methods.setdefault(f"{experiment.method_name}: {key}", []).append(value_text(value))
    apart |= {key: " | ".join(dict.fromkeys(values)) for key, values in methods.items()}
    text = markup.key_values(apart, ("setting that differs", "values")) if apart else ""
    return text + markup.folded("Settings that all runs share", markup.key_values(shared))


def _environments(runs: Runs) -> str:
    """Each distinct environment once, with the number of runs that had it."""
    found: dict[str, int] = {}
    for run in runs.experiments:
        text = json.dumps({key: value for key, value in run_environment(runs, run).items() if key not in RECIPE})
        found[text] = found.get(text, 0) + 1
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


def _commands(runs: Runs) -> str:
    lines = [
        command_line(experiment, run_folder(runs, run) / "experiment.toml")
        for run, experiment in runs.experiments.items()
    ]
    hint = (
        '<p class="soft">There is one line per run. Set FEDSIM_DATA (or data.root) to the folder of the data sets.'
        " Finished runs are not repeated; add --output FOLDER if these runs are still in outputs/. "
        "The numbers are the same on the same machine and runtime.</p>"
    )
    return hint + f"<pre>{escape(chr(10).join(lines))}</pre>"
