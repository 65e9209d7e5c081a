"""One HTML page that holds everything about some runs: results, charts, costs, disclosure, settings, commands."""

import base64
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from markupsafe import Markup

from fedsim.analysis import combinations
from fedsim.analysis.compare import compare, run_labels
from fedsim.analysis.comparison import MARKS, Comparison, accuracy_cells, comparison_table, further_columns, shown_label
from fedsim.analysis.metrics import METRICS, kept, kept_predictions, per_class_accuracy
from fedsim.analysis.notes import part_notes
from fedsim.analysis.page import page
from fedsim.analysis.report_data import Json, chart_data, run_data
from fedsim.analysis.statistics import over_seeds
from fedsim.common.files import atomic_write, drawn
from fedsim.common.tables import LABEL, MISSING, Cell, Column, Row, Table, percent
from fedsim.common.tasks import task_of
from fedsim.common.templates import fill
from fedsim.records.cases import STRUCTURE_QUANTITIES, Cases, read_cases
from fedsim.records.differences import comparable_settings, differing_settings, value_text
from fedsim.records.predictions import Predictions, pooled, read_predictions
from fedsim.records.reading import Runs, of_experiment, read_runs, run_environment, run_folder
from fedsim.records.selection import RULES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Notes = Mapping[str, Mapping[str, str]]
ByTarget = Mapping[str, Mapping[str, Sequence[Cases]]]  # {label: {target: the cases of each seed}}
PIXELS_PER_INCH = 120
RECIPE = ("recipe", "defaults")  # of environment.json, which are no part of an environment
RULE_HEADS = {"best_validation": "best validation", "last": "last round", "oracle": "ORACLE (upper bound)"}
BYTES_NOTE = (
    "Bytes per round are sums over the clients of a round, mean over the rounds from 1 on. What comes before round 1 "
    "(a first model or style of each client) is in clients.csv under round 0 and in the figure of costs."
)
STRUCTURES_NOTE = (
    "The numbers are averages over the images and seeds of a target, then over the targets. Distance: average "
    "symmetric surface distance, less is better; where a structure was not predicted at all, the diagonal of the image "
    "counts."
)


@dataclass(frozen=True)
class Picture:
    """A picture in the page: SVG or PNG, its caption, which is also the alternative text, and its width in inches.

    Even on a wide screen it is not shown larger.
    """

    content: bytes
    caption: str
    inches: float
    kind: str = "svg+xml"

    @property
    def source(self) -> str:
        """The content as data URI."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.content).decode()}"

    @property
    def pixels(self) -> int:
        """The width on the screen."""
        return round(PIXELS_PER_INCH * self.inches)


@dataclass(frozen=True)
class Section:
    """What report.html shows of one experiment; None and empty lists are not shown.

    chart: the place of its numbers among those of all charts
    """

    name: str
    chart: int
    results: Table
    pictures: list[Picture]
    cases: list[Picture]
    metrics: Table | None
    classes: Table | None
    structures: Table | None
    searches: list[Table]
    costs: Table
    runs: Table
    settings_apart: Table
    settings_shared: Table
    environments: list[Table]
    commands: list[str]


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


def report_page(runs: Runs, notes: Notes, by: Sequence[str] = (), live: Markup | None = None) -> str:
    """The page as text. live: HTML before the tables, which the server of the page changes."""
    names = sorted({experiment.name for experiment in runs.experiments.values()})
    data: Json = {"experiments": [], "runs": []}
    content = fill(
        "analysis/report.html",
        premise=premise(runs),
        only=" ".join(part_notes(runs.only)),
        live=live or Markup(),
        sections=[_section(of_experiment(runs, name), name, notes, by, data) for name in names],
    )
    return page(f"fedsim report: {', '.join(names)}", content, data, live=live is not None)


def premise(runs: Runs) -> str:
    """What all numbers have in common; methods that train on the unseen domain are tested on its other images."""
    used = runs.summary.get("uses_target_unlabelled", pd.Series(dtype=str))
    if not (used.astype(str) == "True").any():
        return "Domain generalization: every number was measured on a domain that no client held."
    return (
        "Domain generalization: every number was measured on images of a domain that no client held; "
        f"methods with {MARKS['uses_target_unlabelled']} trained on other images of that domain, without labels."
    )


def _section(runs: Runs, name: str, notes: Notes, by: Sequence[str], data: Json) -> Section:
    """The section of an experiment; what its charts and the pages of its runs show is added to `data`.

    Methods are tested against fedavg where there are runs of it.
    """
    baseline = "fedavg" if "fedavg" in run_labels(runs, by).values() else ""
    comparison = compare(runs, baseline=baseline, by=by)
    apart, shared = settings_apart(runs)
    groups = {method: texts.get("group", "") for method, texts in notes.items()}
    pages = {run: place for place, run in enumerate(runs.summary["run"], len(data["runs"]))}
    chart = len(data["experiments"])
    data["experiments"].append(chart_data(runs, comparison, groups, pages))
    data["runs"] += run_data(runs, comparison, shared)
    cases = kept(runs, comparison.labels, comparison.select, read_cases)
    metrics, classes = more_than_accuracy(runs, comparison, by)
    return Section(
        name=name,
        chart=chart,
        results=results_table(comparison, groups, pages),
        pictures=[*feature_pictures(runs), *search_pictures(runs, name)],
        cases=case_pictures(runs, name, cases),
        metrics=metrics,
        classes=classes,
        structures=segmentation(cases),
        searches=combinations.tables(runs),
        costs=costs_table(runs, comparison, notes),
        runs=runs_table(runs, comparison.labels, pages),
        settings_apart=key_values(apart, ("setting that differs", "values")),
        settings_shared=key_values(shared, ("setting", "value")),
        environments=environment_tables(runs),
        commands=[data["runs"][place]["command"] for place in pages.values()],
    )


def results_table(comparison: Comparison, groups: Mapping[str, str], pages: Mapping[str, int]) -> Table:
    """The main table; a cell leads to the page of its run, the first of its seeds, and bytes are all in MB.

    groups: {method: what it changes}, a column of its own where there is any
    pages: {run: the place of its page}
    """
    table = comparison_table(comparison)
    columns, rows = list(table.columns), []
    first_cost = 1 + len(comparison.columns)
    sizes = {}  # {place of a column: column of the methods} of bytes
    for place, key in enumerate(further_columns(comparison), first_cost):
        if key.startswith("bytes_"):
            sizes[place] = key
            columns[place] = Column(f"{columns[place].heading} (MB)")
    first_seeds = comparison.table.sort_values("seed").drop_duplicates(["label", "target"])
    links = {(run.label, run.target): f"#run={pages[run.run]}" for run in first_seeds.itertuples()}
    for method, row in zip(comparison.methods.to_dict("records"), table.rows):
        cells = row.full_cells
        for place, target in enumerate(comparison.targets, 1):
            cells[place] = replace(cells[place], link=links.get((method["label"], target), ""))
        for place, key in sizes.items():
            cells[place] = megabytes(method[key])
        rows.append(Row(cells))
    rows += table.rows[len(rows) :]  # of the papers
    result = replace(table, columns=columns, rows=rows)
    return _with_groups(result, comparison, groups) if any(groups.values()) else result


def _with_groups(table: Table, comparison: Comparison, groups: Mapping[str, str]) -> Table:
    """The table with a second column, which says what each method changes."""
    label, *columns = table.columns
    methods = list(comparison.methods["method"])
    rows = []
    for number, row in enumerate(table.rows):
        group = groups.get(methods[number], "") if number < len(methods) else ""
        name, *cells = row.cells
        rows.append(replace(row, cells=[name, group, *cells]))
    return replace(table, columns=[label, Column("Changes", "left", style="words"), *columns], rows=rows)


def megabytes(size: float) -> Cell:
    """A size in the unit of its column, so that the column can be filtered by a number."""
    return Cell(MISSING if pd.isna(size) else f"{size / 1e6:,.4g}", value=size / 1e6)


def feature_pictures(runs: Runs) -> list[Picture]:
    """The t-SNE that `fedsim features` has drawn; they are PNG, because SVG of so many points is large."""
    pictures = []
    for run in runs.experiments:
        for file in run_folder(runs, run).glob("plots/features-*.png"):
            pictures.append(Picture(file.read_bytes(), f"t-SNE of features by class and by domain: {run}", 11, "png"))
    return pictures


def search_pictures(runs: Runs, name: str) -> list[Picture]:
    """A picture of every combination search in the folders of the runs."""
    searches = combinations.searches_of(runs)
    if not searches:
        return []  # without matplotlib, which takes a second to import
    from fedsim.analysis.figure_style import look

    with look([name, *runs.summary["target"]]):
        return [_drawn(figure) for _, figure in combinations.figures(searches, name)]


def case_pictures(runs: Runs, name: str, cases: ByTarget) -> list[Picture]:
    """Pictures of segmented images, one for each method and target."""
    if not cases:
        return []
    from fedsim.analysis.figure_style import look
    from fedsim.analysis.prediction_figures import case_grid

    pictures = []
    with look([name, *cases, *runs.summary["target"]]):
        for label, by_target in cases.items():
            for target, seeds in by_target.items():
                pictures.append(_drawn(case_grid(seeds[0], name, label, target)))
    return pictures


def _drawn(figure: "Figure") -> Picture:
    content = drawn(figure, "svg", facecolor="white", metadata={"Date": None})
    return Picture(content, figure.get_suptitle().replace("\n", " "), figure.get_figwidth())


def more_than_accuracy(runs: Runs, comparison: Comparison, by: Sequence[str]) -> tuple[Table | None, Table | None]:
    """(every metric of the kept predictions per method, the accuracy of each class); None without predictions."""
    predictions = kept_predictions(runs, comparison.labels, comparison.select)
    if not predictions:
        return None, None
    names = [name for name, metric in METRICS.items() if metric.read is read_predictions and not metric.primary]
    tables = {name: compare(runs, comparison.select, None, by, published=False, metric=name) for name in names}
    cells = {name: accuracy_cells(table) for name, table in tables.items()}
    rows = []
    for method in comparison.methods.to_dict("records"):
        averages = [cells[name][method["label"]][-1] for name in names]
        rows.append(Row([shown_label(method), *averages]))
    rule = f"In %, averages over the targets, {over_seeds(comparison.most_seeds)}. Less is better in expected "
    missing = [note for note in tables[names[0]].notes if note.startswith(("Missing", "Not computed"))]
    columns = [LABEL, *(Column(METRICS[name].title) for name in names)]
    table = Table(columns, rows, notes=[f"{rule}calibration error.", *missing])
    return table, class_accuracies(predictions)


def class_accuracies(predictions: Mapping[str, Mapping[str, Predictions]]) -> Table:
    """The recall of every class, pooled over the targets that every method has, and over seeds.

    predictions: {label: {target: those of all seeds}}
    """
    targets, remark = common_targets(predictions)
    classes = next(iter(next(iter(predictions.values())).values())).classes
    rows = []
    for label, by_target in predictions.items() if targets else ():
        recall = per_class_accuracy(pooled([by_target[target] for target in targets]))
        rows.append(Row([label, *map(_percent_cell, recall)]))
    pooling = "The images of all targets and seeds are pooled, so that a target counts by its number of images."
    return Table([LABEL, *map(Column, classes)], rows, notes=[f"{remark}{pooling}"])


def segmentation(cases: ByTarget) -> Table | None:
    """Dice and average symmetric surface distance of each structure, averaged over targets and seeds.

    The targets are those that every method has. None without cases; without such a target it has no rows.
    """
    if not cases:
        return None
    structures = next(iter(next(iter(cases.values())).values()))[0].structures
    targets, remark = common_targets(cases)
    rows = []
    for label, by_target in cases.items() if targets else ():
        shared = [by_target[target] for target in targets]
        dice, distance = (_mean_of_targets(shared, quantity) for quantity in STRUCTURE_QUANTITIES)
        distances = [Cell(f"{value:.2f}", value=float(value)) for value in distance]
        rows.append(Row([label, *map(_percent_cell, dice), *distances]))
    columns = [LABEL]
    columns += [Column(f"{structure}: Dice (%)") for structure in structures]
    columns += [Column(f"{structure}: distance (px)") for structure in structures]
    return Table(columns, rows, notes=[f"{remark}{STRUCTURES_NOTE}"])


def _mean_of_targets(targets: Sequence[Sequence[Cases]], quantity: str) -> np.ndarray:
    """[Q] the mean of a quantity over the images of a seed, the seeds of a target, then the targets."""
    means = []
    for seeds in targets:
        means.append(np.mean([getattr(cases, quantity).mean(axis=0) for cases in seeds], axis=0))
    return np.mean(means, axis=0)


def _percent_cell(value: float) -> Cell:
    return Cell(percent(value), value=100 * float(value))


def common_targets(by_label: Mapping[str, Mapping[str, object]]) -> tuple[list[str], str]:
    """(the targets of {label: {target: ...}} that every label has, a sentence about others; empty without others).

    An average over a method's own targets would make one without the hardest target the best.
    """
    counts: Counter[str] = Counter()  # in how many methods a target is
    for by_target in by_label.values():
        counts.update(by_target.keys())
    common = [target for target, count in counts.items() if count == len(by_label)]
    if len(common) == len(counts):
        return common, ""
    if not common:
        return common, "There are no numbers, because there is no target that every method has. "
    named = ", ".join(common)
    return common, f"The methods have different targets; these numbers are of only {named}, which every method has. "


def costs_table(runs: Runs, comparison: Comparison, notes: Notes) -> Table:
    """Bytes per round by record, seconds per round, and the texts that were given per method."""
    records = [column for column in runs.clients if column.startswith(("bytes_down_", "bytes_up_"))]
    by_record = _record_bytes(runs, records, comparison.labels)
    texts: list[str] = []  # the keys of the texts; `group` stands in the table of results
    for method in comparison.methods["method"]:
        texts += [key for key in notes.get(method, {}) if key not in (*texts, "group")]
    rows = []
    for method in comparison.methods.to_dict("records"):
        label, seconds = method["label"], method["seconds_per_round"]
        sizes = [method["bytes_down_per_round"], method["bytes_up_per_round"]]
        sizes += [by_record.get((label, column), math.nan) for column in records]
        time = Cell(MISSING if pd.isna(seconds) else f"{seconds:.1f}", value=seconds)
        given = notes.get(method["method"], {})
        rows.append(Row([shown_label(method), *map(megabytes, sizes), time, *(given.get(key, "") for key in texts)]))
    heads = ["down/round (MB)", "up/round (MB)", *map(_record_head, records), "s/round"]
    columns = [LABEL, *map(Column, heads)]
    columns += [Column(key.replace("_", " "), "left", style="long") for key in texts]
    return Table(columns, rows, notes=[BYTES_NOTE])


def _record_head(column: str) -> str:
    _, direction, record = column.split("_", 2)
    return f"{record} {direction} (MB)"


def _record_bytes(runs: Runs, records: list[str], labels: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Bytes per round of each record. As in the totals, round 0, which comes before training, is not counted."""
    if not records:
        return {}
    clients = runs.clients.assign(label=runs.clients["run"].map(labels))
    trained = clients[clients["round"] >= 1]
    # A record that is not sent in a round counts zero bytes there, so that the records add up to the total.
    sums = trained.groupby(["label", "run", "round"])[records].sum()
    means = sums.groupby(["label", "run"]).mean().groupby("label").mean().stack()
    return means[means > 0].to_dict()


def runs_table(runs: Runs, labels: Mapping[str, str], pages: Mapping[str, int]) -> Table:
    """Every run with its results under each selection rule, which leads to the run's page."""
    metric = task_of(runs.summary, "last_target_").metric
    columns = [Column("Run", "left"), Column("target"), Column("seed")]
    for rule in RULES:
        columns += [Column(f"{RULE_HEADS[rule]} (%)"), Column("at round")]
    rows = []
    for run in runs.summary.to_dict("records"):
        name = Cell(labels[run["run"]], link=f"#run={pages[run['run']]}")
        cells = [name, Cell(run["target"]), Cell(str(run["seed"]), value=int(run["seed"]))]
        for rule in RULES:
            number = run[f"{rule}_round"]
            cells.append(_percent_cell(run[f"{rule}_target_{metric}"]))
            cells.append(Cell(MISSING if pd.isna(number) else f"{number:.0f}", value=number))
        rows.append(Row(cells))
    return Table(columns, rows, notes=[f"Unfinished and therefore left out: {run}" for run in runs.unfinished])


def settings_apart(runs: Runs) -> tuple[dict[str, str], dict[str, str]]:
    """(the settings in which runs differ, with all their values; those that all runs share)."""
    experiments = list(runs.comparable.values())
    differing = differing_settings(experiments, between_methods=True)
    shared = {}
    for key, value in comparable_settings(experiments[0]).items():
        if not key.startswith("method.") and key not in differing:
            shared[key] = value_text(value)
    for experiment in experiments:
        for key, value in comparable_settings(experiment).items():
            if key.startswith("method."):
                differing.setdefault(f"{experiment.method_name}: {key}", []).append(value_text(value))
    return {key: " | ".join(dict.fromkeys(values)) for key, values in differing.items()}, shared


def key_values(values: Mapping[str, object], heads: tuple[str, str], title: str = "") -> Table:
    """Names and values in two columns."""
    rows = [Row([key, str(value)]) for key, value in values.items()]
    return Table([Column(head, "left") for head in heads], rows, title)


def environment_tables(runs: Runs) -> list[Table]:
    """Each distinct environment once, with the number of runs that had it."""
    texts: Counter[str] = Counter()
    for run in runs.experiments:
        environment = run_environment(runs, run)
        texts[json.dumps({key: value for key, value in environment.items() if key not in RECIPE})] += 1
    tables = []
    for text, count in texts.items():
        values = json.loads(text)
        packages = values.pop("packages", {})
        title = f"{count} of {len(runs.experiments)} runs: {values.get('platform', 'not recorded')}"
        tables.append(key_values(values | packages, ("what", "value"), title))
    return tables
