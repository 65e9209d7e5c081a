"""One HTML page that holds everything about some runs: results, charts, costs, disclosure, settings, commands."""

import base64
import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
from markupsafe import Markup

from fedsim.analysis import combinations
from fedsim.analysis.compare import compare, run_labels
from fedsim.analysis.comparison import (
    MARKS,
    POOLED,
    Comparison,
    accuracy_cells,
    comparison_table,
    further_columns,
    shown_label,
)
from fedsim.analysis.metrics import METRICS, kept, kept_predictions, metrics_of, per_class_accuracy
from fedsim.analysis.notes import part_notes
from fedsim.analysis.page import page
from fedsim.analysis.report_data import Json, chart_data, run_data
from fedsim.analysis.statistics import over_seeds
from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write, drawn
from fedsim.common.lists import keys_of
from fedsim.common.tables import LABEL, MISSING, Cell, Column, Row, Table, percent
from fedsim.common.tasks import BY_METRIC, UNDEFINED, Task, task_of
from fedsim.common.templates import fill
from fedsim.records.cases import STRUCTURE_QUANTITIES, Cases, read_cases
from fedsim.records.differences import comparable_settings, differing_settings, value_text
from fedsim.records.predictions import Predictions, pooled
from fedsim.records.reading import Runs, of_experiment, read_runs, run_environment, run_folder, with_unseen
from fedsim.records.selection import RULES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Cells = list[Cell | str]  # of a row
Notes = Mapping[str, Mapping[str, str]]
ByTarget = Mapping[str, Mapping[str, Sequence[Cases]]]  # {label: {target: the cases of each seed}}
PIXELS_PER_INCH = 120
# Of environment.json: what a run computed or is made of, which is no part of its environment.
OF_THE_RUN = ("format", "recipe", "defaults", "scale", "doubt", "stopped")
RULE_HEADS = {  # each is a number of the unseen domain, at the round that a rule selects
    "best_validation": "target at best validation",
    "last": "target at last round",
    "oracle": "target at its best: ORACLE (upper bound)",
}
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
        content = base64.b64encode(self.content).decode()
        return f"data:image/{self.kind};base64,{content}"

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
    """Return the page as text; UserError where no run leaves a domain out.

    live: HTML before the tables, which the server of the page changes
    """
    runs = with_unseen(runs)
    names = sorted({experiment.name for experiment in runs.experiments.values()})
    data: Json = {"experiments": [], "runs": []}
    sections = []
    for name in names:
        part = of_experiment(runs, name)
        sections.append(_section(part, name, notes, by, data))
    content = fill(
        "analysis/report.html",
        premise=premise(runs),
        only=" ".join(part_notes(runs.only)),
        live=live or Markup(),
        sections=sections,
    )
    return page(
        f"fedsim report: {', '.join(names)}",
        content,
        data,
        live=live is not None,
    )


def premise(runs: Runs) -> str:
    """What all numbers have in common; methods that train on the unseen domain are tested on its other examples."""
    used = runs.summary.get("uses_target_unlabelled", pd.Series(dtype=str))
    if not (used.astype(str) == "True").any():
        return "Domain generalization: every number was measured on a domain that no client held."
    return (
        "Domain generalization: every number was measured on examples of a domain that no client held; "
        f"methods with {MARKS['uses_target_unlabelled']} trained on other examples of that domain, without labels."
    )


def _section(runs: Runs, name: str, notes: Notes, by: Sequence[str], data: Json) -> Section:
    """The section of an experiment; what its charts and the pages of its runs show is added to `data`."""
    comparison = _compared(runs, by)
    apart, shared = settings_apart(runs)
    groups = {}
    for method, texts in notes.items():
        groups[method] = texts.get("group", "")
    chart = len(data["experiments"])
    first_page = len(data["runs"])
    pages = {}
    for place, run in enumerate(runs.summary["run"], first_page):
        pages[run] = place
    data["experiments"].append(chart_data(runs, comparison, groups, pages))
    own_pages = run_data(runs, comparison, shared)
    data["runs"] += own_pages
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
        commands=[each["command"] for each in own_pages],
    )


def _compared(runs: Runs, by: Sequence[str]) -> Comparison:
    """Return the comparison of the runs, whose tests are against fedavg where there are runs of it."""
    labels = run_labels(runs, by)
    baseline = "fedavg" if "fedavg" in labels.values() else ""
    return compare(runs, baseline=baseline, by=by)


def results_table(comparison: Comparison, groups: Mapping[str, str], pages: Mapping[str, int]) -> Table:
    """The main table; a cell leads to the page of its run, the first of its seeds, and bytes are all in MB.

    groups: {method: what it changes}, a column of its own where there is any
    pages: {run: the place of its page}
    """
    table = comparison_table(comparison)
    columns = list(table.columns)
    first_cost = 1 + len(comparison.columns)
    sizes = {}  # {place of a column: column of the methods} of bytes
    for place, key in enumerate(further_columns(comparison), first_cost):
        if key.startswith("bytes_"):
            sizes[place] = key
            heading = columns[place].heading
            columns[place] = Column(f"{heading} (MB)")
    links = _links(comparison.table, pages)
    rows = []
    for method, row in zip(comparison.methods.to_dict("records"), table.rows):
        cells = row.full_cells
        for place, target in enumerate(comparison.targets, 1):
            link = links.get((method["label"], target), "")
            cells[place] = replace(cells[place], link=link)
        for place, key in sizes.items():
            cells[place] = megabytes(method[key])
        rows.append(Row(cells))
    rows += table.rows[len(rows) :]  # of the papers
    result = replace(table, columns=columns, rows=rows)
    if not any(groups.values()):
        return result
    return _with_groups(result, comparison, groups)


def _links(table: pd.DataFrame, pages: Mapping[str, int]) -> dict[tuple[str, str], str]:
    """{(label, target): the place in the page where the run of their first seed is}."""
    first_seeds = table.sort_values("seed")
    first_seeds = first_seeds.drop_duplicates(["label", "target"])
    links = {}
    for run in first_seeds.itertuples():
        page_of_run = pages[run.run]
        links[run.label, run.target] = f"#run={page_of_run}"
    return links


def _with_groups(table: Table, comparison: Comparison, groups: Mapping[str, str]) -> Table:
    """The table with a second column, which says what each method changes."""
    label, *columns = table.columns
    texts = [groups.get(method, "") for method in comparison.methods["method"]]
    texts += [""] * (len(table.rows) - len(texts))  # of the papers
    rows = []
    for row, group in zip(table.rows, texts):
        name, *cells = row.cells
        rows.append(replace(row, cells=[name, group, *cells]))
    changes = Column("Changes", "left", style="words")
    return replace(table, columns=[label, changes, *columns], rows=rows)


def megabytes(size: float) -> Cell:
    """A size in the unit of its column, so that the column can be filtered by a number."""
    value = size / 1e6
    text = MISSING if pd.isna(size) else f"{value:,.4g}"
    return Cell(text, value=value)


def feature_pictures(runs: Runs) -> list[Picture]:
    """The t-SNE that `fedsim features` has drawn; they are PNG, because SVG of so many points is large."""
    pictures = []
    for run in runs.experiments:
        caption = f"t-SNE of features by class and by domain: {run}"
        for file in run_folder(runs, run).glob("plots/features-*.png"):
            content = file.read_bytes()
            pictures.append(Picture(content, caption, 11, "png"))
    return pictures


def search_pictures(runs: Runs, name: str) -> list[Picture]:
    """A picture of every combination search in the folders of the runs."""
    searches = combinations.searches_of(runs)
    if not searches:
        return []  # without matplotlib, which takes a second to import
    from fedsim.analysis.figure_style import look

    pictures = []
    with look([name, *runs.summary["target"]]):
        for _, figure in combinations.figures(searches, name):
            pictures.append(_drawn(figure))
    return pictures


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
                figure = case_grid(seeds[0], name, label, target)
                pictures.append(_drawn(figure))
    return pictures


def _drawn(figure: "Figure") -> Picture:
    content = drawn(figure, "svg", facecolor="white", metadata={"Date": None})
    title = figure.get_suptitle()
    caption = title.replace("\n", " ")
    return Picture(content, caption, figure.get_figwidth())


def more_than_accuracy(runs: Runs, comparison: Comparison, by: Sequence[str]) -> tuple[Table | None, Table | None]:
    """(every metric of the kept predictions per method, the accuracy of each class); None without predictions."""
    task = BY_METRIC[comparison.metric]
    predictions = kept_predictions(runs, comparison.labels, comparison.select) if task.has_classes else {}
    if task.maps or (task.has_classes and not predictions):
        return None, None
    tables = _other_metrics(runs, comparison, by)
    if not tables:
        return None, None
    cells = {name: accuracy_cells(table) for name, table in tables.items()}
    rows = []
    for method in comparison.methods.to_dict("records"):
        row: Cells = [shown_label(method)]
        for of_metric in cells.values():
            of_method = of_metric[method["label"]]
            row.append(of_method[-1])
        rows.append(Row(row))
    columns = [LABEL]
    for table in tables.values():
        columns.append(Column(table.measure.heading))
    classes = class_accuracies(predictions) if predictions else None
    return Table(columns, rows, notes=_notes_on_metrics(tables, comparison)), classes


def _other_metrics(runs: Runs, comparison: Comparison, by: Sequence[str]) -> dict[str, Comparison]:
    """{metric: its comparison} of the metrics of the task besides its own; without those that no run has."""
    tables = {}
    for name in metrics_of(BY_METRIC[comparison.metric]):
        if name == comparison.metric:
            continue
        with contextlib.suppress(UserError):  # no run has what this one needs, such as a threshold
            tables[name] = compare(
                runs,
                comparison.select,
                by=by,
                published=False,
                metric=name,
            )
    return tables


def _notes_on_metrics(tables: Mapping[str, Comparison], comparison: Comparison) -> list[str]:
    """What the numbers of a table of several metrics are, and which of them are missing or undefined."""
    measures = [table.measure for table in tables.values()]
    titles = " and ".join(measure.title for measure in measures if measure.less_is_better)
    less = f" Less is better in {titles}." if titles else ""
    notes = [f"Averages over the targets, {over_seeds(comparison.most_seeds)}.{less}"]
    for table in tables.values():
        for note in table.notes:
            if note.startswith(("Missing", "Not computed")) or "is not defined" in note:
                notes.append(note)
    return list(dict.fromkeys(notes))


def class_accuracies(predictions: Mapping[str, Mapping[str, Predictions]]) -> Table:
    """The recall of every class, pooled over the targets that every method has, and over seeds.

    predictions: {label: {target: those of all seeds}}
    """
    targets, note = common_targets(predictions)
    classes = first_of(predictions).classes
    rows = []
    for label, by_target in predictions.items() if targets else ():
        of_all = pooled([by_target[target] for target in targets])
        recall = map(_percent_cell, per_class_accuracy(of_all))
        rows.append(Row([label, *recall]))
    pooling = "The examples of all targets and seeds are pooled, so that a target counts by its number of examples."
    columns = [LABEL, *map(Column, classes)]
    return Table(columns, rows, notes=[f"{note}{pooling}"])


def first_of(by_label: Mapping[str, Mapping[str, T]]) -> T:
    """Return what {label: {target: ...}} has of the first label and its first target."""
    by_target = next(iter(by_label.values()))
    return next(iter(by_target.values()))


def segmentation(cases: ByTarget) -> Table | None:
    """Dice and average symmetric surface distance of each structure, averaged over targets and seeds.

    The targets are those that every method has. None without cases; without such a target it has no rows.
    """
    if not cases:
        return None
    structures = first_of(cases)[0].structures
    targets, note = common_targets(cases)
    rows = []
    for label, by_target in cases.items() if targets else ():
        shared = [by_target[target] for target in targets]
        dice, distance = (_mean_of_targets(shared, quantity) for quantity in STRUCTURE_QUANTITIES)
        cells: Cells = [label, *map(_percent_cell, dice)]
        for value in distance:
            text = MISSING if np.isnan(value) else f"{value:.2f}"
            cells.append(Cell(text, value=float(value)))
        rows.append(Row(cells))
    columns = [LABEL]
    columns += [Column(f"{structure}: Dice (%)") for structure in structures]
    columns += [Column(f"{structure}: distance (px)") for structure in structures]
    return Table(columns, rows, notes=[f"{note}{STRUCTURES_NOTE}"])


def _mean_of_targets(targets: Sequence[Sequence[Cases]], quantity: str) -> np.ndarray:
    """[Q] the mean of a quantity over the images of a seed, the seeds of a target, then the targets."""
    means = []
    for seeds in targets:
        of_seeds = [cases.means(quantity) for cases in seeds]
        means.append(np.mean(of_seeds, axis=0))
    return np.ma.masked_invalid(means).mean(axis=0).filled(np.nan)  # of the targets in which a structure occurs


def _percent_cell(value: float) -> Cell:
    return Cell(percent(value), value=100 * float(value))


def common_targets(by_label: Mapping[str, Mapping[str, object]]) -> tuple[list[str], str]:
    """(the targets of {label: {target: ...}} that every label has, a sentence about others; empty without others).

    An average over a method's own targets would make one without the hardest target the best.
    """
    counts: Counter[str] = Counter()  # in how many methods a target is
    for by_target in by_label.values():
        counts.update(by_target.keys())
    methods = len(by_label)
    common = [target for target in counts if counts[target] == methods]
    if len(common) == len(counts):
        return common, ""
    if not common:
        return common, "There are no numbers, because there is no target that every method has. "
    named = ", ".join(common)
    return common, f"The methods have different targets; these numbers are of only {named}, which every method has. "


def costs_table(runs: Runs, comparison: Comparison, notes: Notes) -> Table:
    """Bytes per round by record, seconds per round, and the texts that were given per method."""
    records = []
    for column in runs.clients:
        if column.startswith(("bytes_down_", "bytes_up_")):
            records.append(column)
    by_record = _record_bytes(runs, records, comparison.labels)
    notes_of_methods = [notes.get(method, {}) for method in comparison.methods["method"]]
    texts = keys_of(notes_of_methods)
    if "group" in texts:  # it stands in the table of results
        texts.remove("group")
    rows = []
    for method in comparison.methods.to_dict("records"):
        label = method["label"]
        of_method = [math.nan] * len(records)
        if not method[POOLED]:
            of_method = [by_record.get((label, column), math.nan) for column in records]
        given = notes.get(method["method"], {})
        cells = _cost_cells(method, of_method)
        cells += [given.get(key, "") for key in texts]
        rows.append(Row(cells))
    heads = ["down/round (MB)", "up/round (MB)", *map(_record_head, records), "s/round"]
    columns = [LABEL, *map(Column, heads)]
    for key in texts:
        heading = key.replace("_", " ")
        columns.append(Column(heading, "left", style="long"))
    return Table(columns, rows, notes=[BYTES_NOTE])


def _cost_cells(method: Mapping[str, Any], of_records: list[float]) -> Cells:
    """The label of a method, its bytes in total and of each record, and its seconds per round."""
    seconds = method["seconds_per_round"]
    time = MISSING if pd.isna(seconds) else f"{seconds:.1f}"
    sizes = [
        method["bytes_down_per_round"],
        method["bytes_up_per_round"],
        *of_records,
    ]
    return [
        shown_label(method),
        *map(megabytes, sizes),
        Cell(time, value=seconds),
    ]


def _record_head(column: str) -> str:
    _, direction, record = column.split("_", 2)
    return f"{record} {direction} (MB)"


def _record_bytes(runs: Runs, records: list[str], labels: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Bytes per round of each record. As in the totals, round 0, which comes before training, is not counted."""
    if not records:
        return {}
    label = runs.clients["run"].map(labels)
    clients = runs.clients.assign(label=label)
    trained = clients[clients["round"] >= 1]
    # A record that is not sent in a round counts zero bytes there, so that the records add up to the total.
    sums = trained.groupby(["label", "run", "round"])[records].sum()
    of_runs = sums.groupby(["label", "run"]).mean()
    means = of_runs.groupby("label").mean().stack()
    return means[means > 0].to_dict()


def runs_table(runs: Runs, labels: Mapping[str, str], pages: Mapping[str, int]) -> Table:
    """Every run with its results under each selection rule, which leads to the run's page."""
    task = task_of(runs.summary, "last_target_")
    columns = [Column("Run", "left"), Column("target"), Column("seed")]
    for rule in RULES:
        head = RULE_HEADS[rule]
        columns += [Column(f"{head} (%)" if task.is_fraction else head), Column("at round")]
    rows = []
    for run in runs.summary.to_dict("records"):
        name, seed = run["run"], int(run["seed"])
        cells: Cells = [
            Cell(labels[name], link=f"#run={pages[name]}"),
            Cell(run["target"]),
            Cell(str(seed), value=seed),
        ]
        for rule in RULES:
            number = run[f"{rule}_round"]
            text = MISSING if pd.isna(number) else f"{number:.0f}"
            value = float(run[f"{rule}_target_{task.metric}"])
            cells.append(_result_cell(task, value, number))
            cells.append(Cell(text, value=number))
        rows.append(Row(cells))
    notes = [f"Unfinished and therefore left out: {run}" for run in runs.unfinished]
    return Table(columns, rows, notes=notes)


def _result_cell(task: Task, value: float, number: float) -> Cell:
    """The cell of a run's result at a round; it is undefined where there is such a round and no value."""
    measure = METRICS[task.metric]
    text = measure.number(value)
    if math.isnan(value) and not math.isnan(number):
        text = UNDEFINED
    return Cell(text, value=measure.factor * value)


def settings_apart(runs: Runs) -> tuple[dict[str, str], dict[str, str]]:
    """(the settings in which runs differ, with all their values; those that all runs share)."""
    experiments = list(runs.comparable.values())
    differing = differing_settings(experiments, between_methods=True)
    shared = {}
    of_all = set.intersection(*(set(comparable_settings(experiment)) for experiment in experiments))
    for key, value in comparable_settings(experiments[0]).items():
        if not key.startswith("method.") and key not in differing and key in of_all:
            shared[key] = value_text(value)
    for experiment in experiments:
        for key, value in comparable_settings(experiment).items():
            if key.startswith("method."):
                values = differing.setdefault(f"{experiment.method_name}: {key}", [])
                values.append(value_text(value))
    apart = {}
    for key, values in differing.items():
        apart[key] = " | ".join(dict.fromkeys(values))
    return apart, shared


def key_values(values: Mapping[str, object], heads: tuple[str, str], title: str = "") -> Table:
    """Names and values in two columns."""
    rows = []
    for key, value in values.items():
        rows.append(Row([key, str(value)]))
    columns = [Column(head, "left") for head in heads]
    return Table(columns, rows, title)


def environment_tables(runs: Runs) -> list[Table]:
    """Each distinct environment once, with the number of runs that had it."""
    texts: Counter[str] = Counter()
    for run in runs.experiments:
        environment = run_environment(runs, run)
        for key in OF_THE_RUN:
            environment.pop(key, None)
        texts[json.dumps(environment)] += 1
    tables = []
    for text, count in texts.items():
        values = json.loads(text)
        packages = values.pop("packages", {})
        platform = values.get("platform", "not recorded")
        title = f"{count} of {len(runs.experiments)} runs: {platform}"
        tables.append(key_values(values | packages, ("what", "value"), title))
    return tables
