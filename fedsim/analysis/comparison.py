"""The comparison of methods: its numbers, the texts of its cells, and its table."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
from rich.console import Console

from fedsim.analysis.metrics import METRICS, Metric
from fedsim.analysis.statistics import shared_targets
from fedsim.common.errors import UserError, nearest
from fedsim.common.tables import LABEL, MISSING, Cell, Column, Row, Table, show_tables, tables_text
from fedsim.common.tasks import BY_METRIC, CLASSIFICATION, UNDEFINED
from fedsim.data.benchmarks import AVERAGE
from fedsim.records.selection import BUDGETS

COSTS = ("bytes_down_per_round", "bytes_up_per_round", "seconds_per_round")
WORST = "worst"  # column of the methods
FORMATS = ("table", "csv", "markdown", "latex")
# Marks of the groups of methods, each of which is ranked separately: federated methods that never see the target have
# none; then come pooled training, which has no rank, and the uses of target images, the weakest first.
POOLED = "pooled"
MARKS = {"": "", POOLED: "§", "transductive": "†", "uses_target_unlabelled": "‡"}
GROUPS = tuple(MARKS)


@dataclass
class Comparison:
    """The numbers of a comparison and the notes on them; `render` and `show` print it.

    cells: one row per method and target (`average` included): label, method, the keys of `by`, target, mean, std,
    seeds (their number), over (which they are).
    methods: one row per method: label, method, the keys of `by`, average, average_std, seeds (those with all targets),
    worst, seeds_begun, rank, difference, p_value, p_holm, pairs, differing, images, steps, bytes_down_per_round,
    bytes_up_per_round, seconds_per_round, transductive, uses_target_unlabelled, group.
    `worst` is the worst mean over seeds among the targets in `shared`; it is there if these are two or more.
    `difference` (a fraction of accuracy) and `p_value` rest on the same `pairs`: the cells (target, seed) that the
    method and the baseline both have. With a baseline the rank follows the difference (the baseline's is 0), so that
    rank, difference and p never contradict each other; a method without a pair on every target has no rank. Without a
    baseline the rank is that of the average over the seeds that all ranked methods have (`ranked_seeds`).
    `group` says how a method uses images of the target, or that it is not federated; it is empty for any other. Each
    group is ranked separately; pooled training has neither a rank nor bytes.
    published: numbers from papers for the same setting (label, method, source, target, mean, std).
    metric: what the cells hold. With another metric than accuracy (a task's own, or one that is computed from the kept
    predictions), "accuracy" in this text means that metric. rule: `select` in words.
    table: one row per run, of which all the others are made: run, label, method, target, seed, accuracy, costs.
    is_primary: whether the metric is that of the runs' task, which their records hold.
    undefined: the targets on which the metric has no value in any run; averages and ranks are over the others.
    unit: what an example is called, in the plural: images, rows or examples.
    """

    title: str
    select: str
    targets: list[str]
    cells: pd.DataFrame
    methods: pd.DataFrame
    published: pd.DataFrame
    baseline: str = ""
    ranked_seeds: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    metric: str = "accuracy"
    rule: str = ""
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    is_primary: bool = True
    undefined: tuple[str, ...] = ()
    unit: str = "images"

    @property
    def measure(self) -> Metric:
        """The metric of the cells, which as a task's own has its title there."""
        metric = METRICS[self.metric]
        if not self.is_primary or self.metric not in BY_METRIC:
            return metric
        return replace(metric, title=BY_METRIC[self.metric].title)

    @property
    def measured(self) -> str:
        """What the cells hold, in words."""
        return f"{self.measure.title} on the unseen domain"

    @property
    def defined(self) -> list[str]:
        """The targets over which averages and ranks are."""
        return [target for target in self.targets if target not in self.undefined]

    @property
    def shared(self) -> list[str]:
        """The targets over which the worst mean is: those that define the metric and that every row has."""
        return shared_targets(self.cells, self.defined)

    @property
    def labels(self) -> dict[str, str]:
        """{run: the label of its row}."""
        return dict(zip(self.table["run"], self.table["label"]))

    @property
    def most_seeds(self) -> int:
        """The largest number of seeds of one method; there is a deviation from two on."""
        return int(self.methods["seeds_begun"].max())

    @property
    def columns(self) -> list[str]:
        """The columns of the accuracies: the targets and `average`."""
        return [*self.targets, AVERAGE]

    def render(self, format: str = "table") -> str:
        """Text of the table as `table` (terminal), `csv`, `markdown` or `latex`."""
        if format not in FORMATS:
            near = nearest(format, FORMATS)
            raise UserError(f"unknown format {format!r}; {near}known: {', '.join(FORMATS)}")
        table = comparison_table(self)
        if format == "csv":
            return table.csv()
        if format == "markdown":
            return table.markdown()
        if format == "latex":  # an oracle's title is in the table, where nobody overlooks it
            return "% needs \\usepackage{booktabs}\n" + table.latex(shows_title=self.select == "oracle")
        return tables_text(terminal_tables(self, table), self.notes)

    def show(self, console: Console | None = None) -> None:
        """Print the table to a rich console (the terminal by default)."""
        show_tables(terminal_tables(self, comparison_table(self)), self.notes, console)


def comparison_table(comparison: Comparison) -> Table:
    """A row per method with its accuracies, ranks, tests and costs, then the papers' rows."""
    further = further_columns(comparison)
    cells = accuracy_cells(comparison)
    rows = []
    group = comparison.methods["group"].iloc[0]
    for method in comparison.methods.to_dict("records"):
        is_apart = method["group"] != group
        group = method["group"]
        row: list[Cell | str] = [
            Cell(shown_label(method)),
            *cells[method["label"]],
            *further_cells(comparison, method),
        ]
        rows.append(Row(row, is_apart=is_apart))
    empty = [""] * len(further)
    for number, (label, printed) in enumerate(published_cells(comparison)):
        is_first = number == 0
        rows.append(Row([label, *printed, *empty], "published", is_apart=is_first))
    heads = [*comparison.targets, "Average", *further.values()]
    return Table(
        [LABEL, *map(Column, heads)],
        rows,
        title=comparison.title,
        subtitle=f"{comparison.measured} (%)" if comparison.measure.is_fraction else comparison.measured,
        notes=comparison.notes,
        records=_records(comparison),
    )


def terminal_tables(comparison: Comparison, table: Table) -> list[Table]:
    """The table in two: the accuracies with the papers' rows, and below them ranks, tests and costs."""
    accuracies = len(comparison.columns) + 1
    if WORST in comparison.methods:
        accuracies += 1
    further = range(accuracies, len(table.columns))
    return [
        table.part(range(accuracies), table.title, table.subtitle),
        table.part([0, *further], "rank, test and cost"),
    ]


def _records(comparison: Comparison) -> list[dict[str, Any]]:
    """One record per method: numbers in full precision, accuracies as fractions, published rows below ours."""
    records: list[dict[str, Any]] = []
    by_label = dict(iter(comparison.cells.groupby("label")))
    for method in comparison.methods.to_dict("records"):
        label = method["label"]
        record = {
            "label": label,
            "method": method["method"],
            "source": "ours",
            "select": comparison.select,
        }
        if comparison.metric != CLASSIFICATION.metric:
            record["metric"] = comparison.metric
        left_out = {*record, "average", "average_std", "seeds"}
        rest = {}
        for key, value in method.items():
            if key not in left_out:
                rest[key] = value
        records.append(record | _by_target(by_label[label]) | rest)
    for (label, source), cells in comparison.published.groupby(["label", "source"], sort=False):
        method = cells["method"].iloc[0]
        record = {"label": label, "method": method, "source": source}
        records.append(record | _by_target(cells))
    return records


def _by_target(cells: pd.DataFrame) -> dict[str, Any]:
    """`photo_mean`, `photo_std`, `photo_seeds`, ... of the cells of one row."""
    kinds = [kind for kind in ("mean", "std", "seeds") if kind in cells]
    numbers = {}
    for cell in cells.to_dict("records"):
        for kind in kinds:
            numbers[f"{cell['target']}_{kind}"] = cell[kind]
    return numbers


def accuracy_cell(mean: float, std: float, place: int = 0, measure: Metric = METRICS[CLASSIFICATION.metric]) -> Cell:
    """The cell of a metric and its deviation, by default an accuracy; it is sorted by the number that is printed."""
    text = measure.number(mean)
    value = math.nan if text == MISSING else float(text)
    return Cell(text, measure.spread(std), place, value)


def accuracy_cells(comparison: Comparison) -> dict[str, list[Cell]]:
    """{label: its cells, in the order of `columns`}; first and second place of each column follow the printed numbers.

    Methods that use images of the target have no place, because they are ranked apart, nor do those with other seeds in
    the column than most.
    """
    ranked = by_group(comparison)[0]["label"]
    cells: dict[str, list[Cell]] = {}
    for _, column in comparison.cells.groupby("target", sort=False):
        printed = column["mean"].map(comparison.measure.number)
        is_ranked = column["label"].isin(ranked) & (printed != MISSING)
        candidates = _of_equal_seeds(column[is_ranked])
        # Places follow the printed numbers: a reader would not understand why only one of two equal texts is bold.
        numbers = {float(text) for text in printed[candidates.index]}
        best = sorted(numbers, reverse=not comparison.measure.less_is_better)[:2]
        for index, row in column.iterrows():
            of_label = cells.setdefault(row["label"], [])
            if row["target"] in comparison.undefined:
                of_label.append(Cell(UNDEFINED, value=math.nan))
                continue
            place = 0
            if index in candidates.index and float(printed[index]) in best:
                place = best.index(float(printed[index])) + 1
            of_label.append(accuracy_cell(row["mean"], row["std"], place, comparison.measure))
    return cells


def _of_equal_seeds(column: pd.DataFrame) -> pd.DataFrame:
    """Those of a column's cells that rest on the same seeds as most others; none where no two have the same."""
    counts = Counter(column["over"])
    if len(counts) < 2:
        return column
    over = max(counts, key=lambda seeds: (counts[seeds], len(seeds)))
    if counts[over] < 2:
        return column[:0]
    has_these = [seeds == over for seeds in column["over"]]
    return column[has_these]


def further_columns(comparison: Comparison) -> dict[str, str]:
    """{column of the methods: its heading} of what follows the accuracies; budgets are shown where records hold them.

    Both budgets count a whole run, over all clients.
    """
    methods = comparison.methods
    heads = {WORST: "Worst"} if WORST in methods else {}
    heads |= {"seeds": "Seeds", "rank": "Rank"}
    tests = {
        "difference": f"Δ {comparison.baseline}",
        "p_value": "p",
        "p_holm": "p Holm",
        "pairs": "Pairs",
    }
    for key in tests if comparison.baseline else ():
        if key in methods:
            heads[key] = tests[key]
    for key, title in zip(BUDGETS, (comparison.unit, "steps"), strict=True):
        if methods[key].notna().any():
            heads[key] = title.capitalize()
    return heads | dict(zip(COSTS, ("Down/round", "Up/round", "s/round")))


def further_cells(comparison: Comparison, method: Mapping[str, Any]) -> list[Cell]:
    """The cells of the columns that follow the accuracies; they are sorted by their numbers, differences in points."""
    cells = []
    for key in further_columns(comparison):
        if pd.isna(method[key]):
            cells.append(Cell(MISSING, value=math.nan))
            continue
        value = float(method[key])
        if key == WORST:
            cells.append(accuracy_cell(value, math.nan, measure=comparison.measure))
            continue
        if key == "difference":
            text = comparison.measure.difference(value)
            value *= comparison.measure.factor
        else:
            text = _further_text(key, method)
        if key == "pairs" and method["label"] == comparison.baseline:
            text = MISSING
        cells.append(Cell(text, value=value))
    return cells


def _further_text(key: str, method: Mapping[str, Any]) -> str:
    """The text of one of these cells, which is not missing."""
    value = method[key]
    if key == "seeds":
        begun = method["seeds_begun"]
        return f"{value} of {begun}" if value < begun else str(value)
    if key == "rank":
        return f"{value:.0f} {MARKS[method['group']]}".rstrip()
    return TEXTS[key](value)


def published_cells(comparison: Comparison) -> list[tuple[str, list[Cell]]]:
    """(label with its source, cells in the order of `columns`) of the papers' rows."""
    rows = []
    for (label, source), printed in comparison.published.groupby(["label", "source"], sort=False):
        by_target = printed.drop_duplicates("target", keep="last").set_index("target")
        by_target = by_target.reindex(comparison.columns)
        cells = list(map(accuracy_cell, by_target["mean"], by_target["std"]))
        rows.append((f"{label} ({source}, published)", cells))
    return rows


def shown_label(method: Mapping[str, Any]) -> str:
    """Label of a method; a dagger marks those that use images of the target, and § those that are not federated."""
    group = method["group"]
    marks = MARKS[group]
    if method[POOLED] and group != POOLED:
        marks = MARKS[POOLED] + marks
    label = method["label"]
    return f"{label} {marks}".rstrip()


def by_group(comparison: Comparison) -> list[pd.DataFrame]:
    """The methods in groups that are ranked separately; federated ones that never see the target come first."""
    return [rows for _, rows in comparison.methods.groupby("group", sort=False)]


def amount(size: float) -> str:
    """Bytes in decimal units: `134.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    digits = 0 if unit == "B" else 1
    return f"{size:.{digits}f} {unit}"


def without_exchange(rounds: pd.DataFrame, methods: pd.DataFrame) -> pd.DataFrame:
    """Return the rounds with empty bytes for pooled training, which exchanges nothing with anyone.

    rounds: with a label; methods: those of `Comparison`
    """
    labels = methods[methods[POOLED]]["label"]
    is_pooled = rounds["label"].isin(labels)
    columns = rounds.columns.intersection(["bytes_down", "bytes_up"])
    empty = {column: rounds[column].mask(is_pooled) for column in columns}
    return rounds.assign(**empty)


def p_text(p_value: float) -> str:
    """`.016`, or `<.001` for smaller ones."""
    return "<.001" if p_value < 0.001 else f"{p_value:.3f}".removeprefix("0")


def seconds_text(seconds: float) -> str:
    """`2.5`, or `0.012` for a round of less than a second."""
    return f"{seconds:.1f}" if seconds >= 0.95 else f"{seconds:.2g}"


TEXTS: dict[str, Callable[[Any], str]] = {  # of the columns that follow the accuracies
    "p_value": p_text,
    "p_holm": p_text,
    "pairs": str,
    "images": "{:,.0f}".format,
    "steps": "{:,.0f}".format,
    "bytes_down_per_round": amount,
    "bytes_up_per_round": amount,
    "seconds_per_round": seconds_text,
}
