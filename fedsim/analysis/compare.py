"""One table of many runs: methods and unseen domains, with mean and sample standard deviation over seeds.

The average over domains is taken per seed first, then mean and standard deviation over the seeds. The spread of the
average is therefore the one that a new seed would show, and contains no spread between domains. A seed that lacks a
domain has no average. Difference, p and rank use only pairs of runs that both methods have: see `Comparison`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedsim.analysis.agreement import order_notes
from fedsim.analysis.comparison import COSTS, GROUPS, POOLED, WORST, Comparison
from fedsim.analysis.metrics import METRICS, find_metric, frequent_class_shares, metric_values
from fedsim.analysis.notes import (
    comparison_notes,
    damaged_notes,
    edge_notes,
    frequent_class_notes,
    part_notes,
    rare_class_notes,
    round_notes,
    selection_notes,
    stopping_notes,
    verdict_notes,
    without_notes,
)
from fedsim.analysis.provenance import Environments, doubt_notes, environments, provenance_notes, refuse_unlike, unit_of
from fedsim.analysis.published import COLUMNS, RunsOfTable, added_rows, comparable_rows
from fedsim.analysis.statistics import (
    common_seeds,
    corrected,
    grid_of,
    mean_and_std,
    paired,
    per_seed_average,
    ranks,
    worst_means,
)
from fedsim.analysis.worst_source import with_worst_source
from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import CLASSIFICATION, task_of
from fedsim.data.benchmarks import AVERAGE
from fedsim.records.differences import refuse_twice, require_alike, variant_text, variants
from fedsim.records.reading import Runs, with_unseen
from fedsim.records.selection import BUDGETS, RULES, WORST_SOURCE, rule_title
from fedsim.settings.experiment import Experiment

Grids = dict[str, pd.DataFrame]  # {label: its accuracies, seeds × targets}
Experiments = Mapping[str, Experiment]  # by run


class Numbers(NamedTuple):
    """What a comparison computes from its table of runs; the fields are those of `Comparison`."""

    cells: pd.DataFrame
    methods: pd.DataFrame
    baseline: str
    ranked_seeds: dict[str, list[int]]


def compare(
    runs: Runs,
    select: str = "best_validation",
    baseline: str | None = None,
    by: Sequence[str] = (),
    published: bool | Path = True,
    metric: str = "",
    correction: str = "holm",
) -> Comparison:
    """Comparison of all finished runs under one selection rule, which may be `worst` (`with_worst_source`), too.

    metric: empty for the task's own (accuracy, Dice), or one from the kept predictions (`metrics.METRICS`).
    baseline: method or label that the others are compared with over the cells (target, seed) that both have.
    correction: "holm" adds `p_holm`, p corrected for testing all these methods against the baseline; or "none".
    published: whether the papers' numbers are shown; a path adds those of a file (`added_rows`).
    by: dotted settings in which the runs are meant to differ; each combination becomes a row of its own.
    Raises UserError if runs differ in anything but method, target, seed and `by`, or two runs fill the same cell.
    """
    runs = with_unseen(runs)
    if select == WORST_SOURCE:
        runs = with_worst_source(runs)
    task_metric, metric = _check_request(runs, select, metric)
    experiments = _alike(runs, by)
    recorded = environments(runs)
    table = _table_of_runs(runs, experiments, by, f"{select}_target_{task_metric}")
    labels = dict(zip(table["run"], table["label"]))
    refuse_unlike(runs, recorded, labels)
    table["undefined"] = _recorded_as_undefined(table, recorded)
    not_computed = [] if metric == task_metric else _measure(table, runs, metric, select)
    targets = _targets(table)
    computed = numbers(
        table,
        targets,
        by,
        baseline,
        correction,
        metric,
    )
    rule = rule_title(select, experiments.values())
    comparison = Comparison(
        title=f"{_names(runs)}: {rule}",
        select=select,
        targets=targets,
        published=pd.DataFrame(columns=COLUMNS),
        metric=metric,
        rule=rule,
        table=table,
        is_primary=metric == task_metric,
        undefined=undefined_targets(table),
        unit=unit_of(recorded),
        **computed._asdict(),
    )
    _add_worst(comparison)
    reasons = _add_papers(runs, recorded, comparison, published)
    comparison.notes = _all_notes(
        runs,
        recorded,
        not_computed,
        reasons,
        comparison,
    )
    return comparison


def _all_notes(
    runs: Runs,
    recorded: Environments,
    not_computed: list[str],
    reasons: list[str],
    comparison: Comparison,
) -> list[str]:
    """Return all notes below a comparison, of which the verdict is the first; reasons: those on the papers' rows."""
    return [
        *verdict_notes(comparison),
        *_frequent_class_notes(runs, comparison),
        *part_notes(runs.only),
        *comparison_notes(comparison, reasons, runs.unfinished),
        *_notes_on_runs(runs, recorded, not_computed, comparison),
    ]


def _add_worst(comparison: Comparison) -> None:
    """Add to the methods the worst mean among the targets that every row has, after the average and its seeds."""
    targets = comparison.shared
    if len(targets) < 2:
        return
    worst = worst_means(comparison.cells, targets, comparison.measure.less_is_better)
    methods = comparison.methods
    place = methods.columns.get_loc("seeds_begun")
    methods.insert(place, WORST, methods["label"].map(worst))


def _names(runs: Runs) -> str:
    """The names of the runs' experiments."""
    return ", ".join(dict.fromkeys(runs.summary["experiment"]))


def _notes_on_runs(
    runs: Runs,
    recorded: Environments,
    not_computed: list[str],
    comparison: Comparison,
) -> list[str]:
    """Notes on damaged runs, and on how the runs of the table were made and selected."""
    return [
        *damaged_notes(runs.damaged),
        *_undefined_reasons(recorded),
        *doubt_notes(recorded, comparison.metric),
        *provenance_notes(recorded),
        *without_notes(not_computed),
        *round_notes(runs, comparison.select),
        *stopping_notes(runs, comparison.table),
        *_selection_notes(runs, comparison),
    ]


def _frequent_class_notes(runs: Runs, comparison: Comparison) -> list[str]:
    """Return the notes on targets whose examples are nearly all of one class, for accuracy and for the AUROC."""
    if comparison.metric not in ("accuracy", "auroc") or comparison.select not in RULES:
        return []
    shares = frequent_class_shares(
        runs,
        comparison.table,
        comparison.select,
    )
    if comparison.metric == "auroc":
        return rare_class_notes(shares)
    return frequent_class_notes(
        comparison.table,
        shares,
    )


def _check_request(runs: Runs, select: str, metric: str) -> tuple[str, str]:
    """(the metric of the runs' task, the metric of the comparison); UserError for what these runs do not have."""
    rules = (*RULES, WORST_SOURCE)
    if select not in rules:
        near = nearest(select, rules)
        raise UserError(f"unknown selection rule {select!r}; {near}known: {', '.join(rules)}")
    task_metric = task_of(runs.summary, f"{select}_target_").metric
    metric = find_metric(metric or task_metric, task_metric)
    if select == WORST_SOURCE and metric != task_metric:
        raise UserError(f"the rule {select!r} selects rounds whose predictions were not kept: leave {metric} out")
    if runs.summary.empty:
        notes = damaged_notes(runs.damaged)
        raise UserError(" ".join(["no finished run to compare.", *notes]))
    return task_metric, metric


def _measure(table: pd.DataFrame, runs: Runs, metric: str, select: str) -> list[str]:
    """Put a metric of the kept predictions in the place of accuracy; returns why some runs have none."""
    values, reasons = metric_values(runs, metric, select)
    table["accuracy"] = table["run"].map(values).astype(float)
    computed = [values[run] for run in table["run"]]
    table["undefined"] = [value is not None and math.isnan(value) for value in computed]
    return reasons


def _recorded_as_undefined(table: pd.DataFrame, recorded: Environments) -> list[bool]:
    """Of each run, whether its records say that its metric has no value on its target, and it has none."""
    flags = []
    for run, target, value in zip(table["run"], table["target"], table["accuracy"]):
        reasons = recorded.get(run, {}).get("undefined", {})
        flags.append(math.isnan(value) and target in reasons)
    return flags


def _undefined_reasons(recorded: Environments) -> list[str]:
    """What the records say of metrics that have no value, or less meaning than their name; each line once."""
    lines: dict[str, None] = {}
    for environment in recorded.values():
        for domain, reason in environment.get("undefined", {}).items():
            line = reason if domain.startswith("(") else f"{domain}: {reason}"
            lines[f"{line}."] = None
    return list(lines)


def _alike(runs: Runs, by: Sequence[str]) -> Experiments:
    """The settings by which the finished runs are compared; UserError where they differ in anything but `by`."""
    experiments = {}
    for run in runs.summary["run"]:
        experiments[run] = runs.comparable[run]
    require_alike(list(experiments.values()), by, runs.unused_parts)
    return experiments


def _selection_notes(runs: Runs, comparison: Comparison) -> list[str]:
    """Return the notes on the rule: what selected the rounds, and whether many of them are the first or the last."""
    domains = set()
    for run in comparison.table["run"]:
        domains.add(runs.experiments[run].run.validation_domain)
    names = sorted(filter(None, domains))
    if comparison.select == "best_validation" and names:
        rule_notes = [f"The round was selected on {', '.join(names)}, on which no one trained."]
    else:
        rule_notes = selection_notes(comparison.select)
    summary = runs.summary[runs.summary["run"].isin(comparison.table["run"])]
    return [*rule_notes, *edge_notes(summary, comparison.select)]


def numbers(
    table: pd.DataFrame,
    targets: list[str],
    by: Sequence[str],
    baseline: str | None,
    correction: str,
    metric: str,
) -> Numbers:
    """The cells, methods, label of the baseline and seeds of each ranking of a table with a row per run."""
    sign = -1 if METRICS[metric].less_is_better else 1
    averaged = _averaged(table, targets)
    labels = dict.fromkeys(table["label"])
    grids = {label: grid_of(table, label) for label in labels}
    base = _baseline_label(table, baseline)
    rows = []
    for label in grids:
        rows.append(_method(table, label, grids, averaged, base, by))
    ordered = _in_order(pd.DataFrame(rows), sign)
    methods = corrected(ordered, correction)
    cells = []
    for method in methods.to_dict("records"):
        grid = grids[method["label"]]
        cells += _cells(method, grid, targets, averaged, by)
    if base:
        scores = _paired_scores(methods, averaged, base, sign)
        ranked_seeds: dict[str, list[int]] = {}
    else:
        scores, ranked_seeds = _average_scores(methods, grids, averaged, sign)
    methods = methods.drop(columns="covers", errors="ignore")
    # Methods are ranked inside their groups.
    by_group = scores.mask(methods[POOLED]).groupby(methods["group"].to_numpy())
    place = methods.columns.get_loc("seeds_begun") + 1
    methods.insert(place, "rank", by_group.transform(ranks).astype("Int64").to_numpy())
    return Numbers(pd.DataFrame(cells), methods, base, ranked_seeds)


def undefined_targets(table: pd.DataFrame) -> tuple[str, ...]:
    """The targets on which the metric has a value in no run, because it is undefined there in all of them."""
    if "undefined" not in table:
        return ()
    of_target = table.groupby("target")["undefined"].all()
    return tuple(of_target.index[of_target])


def _averaged(table: pd.DataFrame, targets: list[str]) -> list[str]:
    """The targets over which averages and ranks are: those that define the metric."""
    undefined = undefined_targets(table)
    return [target for target in targets if target not in undefined]


def _in_order(methods: pd.DataFrame, sign: int) -> pd.DataFrame:
    """The methods by group, the best average first. Labels that lack a target have no average and come last."""
    keys = pd.DataFrame(
        {
            "group": methods["group"].map(GROUPS.index),
            "average": -sign * methods["average"],
            "label": methods["label"],
        }
    )
    keys = keys.sort_values(["group", "average", "label"], na_position="last", kind="stable")
    ordered = methods.loc[keys.index]
    return ordered.reset_index(drop=True)


def _paired_scores(methods: pd.DataFrame, targets: list[str], base: str, sign: int) -> pd.Series:
    """What ranks the methods next to a baseline: their differences; NaN for one that lacks a pair on a target."""
    is_base = methods["label"] == base
    differences = methods["difference"].mask(is_base, 0.0)
    required = set(targets)
    covered = [covers >= required for covers in methods["covers"]]
    return sign * differences.where(covered)


def _average_scores(
    methods: pd.DataFrame,
    grids: Grids,
    targets: list[str],
    sign: int,
) -> tuple[pd.Series, dict[str, list[int]]]:
    """(averages that rank the methods without a baseline, {group: the seeds on which they rest})."""
    scores = pd.Series(math.nan, index=methods.index)
    ranked_seeds: dict[str, list[int]] = {}
    for group, rows in methods.groupby("group", sort=False):
        averages = {}
        for label in rows["label"]:
            averages[label] = per_seed_average(grids[label], targets)
        labels, seeds = common_seeds(averages)
        ranked_seeds[str(group)] = seeds
        for place, label in rows["label"].items():
            if label in labels:
                average = averages[label][seeds].mean()
                scores[place] = sign * average
    return scores, ranked_seeds


def _add_papers(
    runs: Runs,
    recorded: Environments,
    comparison: Comparison,
    published: bool | Path,
) -> list[str]:
    """Add the papers' rows next to these runs, whose settings are taken as they were given; return notes on them."""
    if not published or comparison.metric != CLASSIFICATION.metric:  # the papers print no other metric
        return []
    table, targets = comparison.table, comparison.targets
    given = {}
    for run in table["run"]:
        given[run] = runs.experiments[run]
    first = next(iter(given.values()))
    ours = RunsOfTable(given, runs.labels(), comparison.labels, recorded)
    rows, notes = comparable_rows(ours, targets)
    notes += order_notes(table, first, targets)
    if isinstance(published, Path):
        added, more = added_rows(published, first, table["method"], targets)
        rows = pd.concat([rows, added], ignore_index=True)
        notes += more
    comparison.published = rows
    return notes


def _targets(table: pd.DataFrame) -> list[str]:
    """The targets, numbers by their size; UserError where one is called like the column of averages."""
    targets = sorted(table["target"].unique(), key=_natural)
    if AVERAGE in targets:
        raise UserError(
            f"a domain is called {AVERAGE!r}, the name of the column of averages; choose --targets without it"
        )
    return targets


def _natural(target: str) -> tuple:
    digits = target.replace(".", "", 1)
    if digits.isascii() and digits.isdigit():  # ² is a digit, too, but no number
        return 0, float(target), ""
    return 1, 0.0, target.lower()


def _table_of_runs(runs: Runs, experiments: Experiments, by: Sequence[str], column: str) -> pd.DataFrame:
    """One row per run: label, method, the values of `by`, target, seed, accuracy, budgets, costs, splits."""
    summary = runs.summary.reset_index(drop=True)
    names = summary["run"]
    values = variants(experiments, by, runs.unused_parts)
    labels = names.map(run_labels(runs, by))
    table = pd.DataFrame({"label": labels, "method": summary["method"]})
    for place, key in enumerate(by):
        table[key] = [values[run][place] for run in names]
    table[["target", "seed"]] = summary[["target", "seed"]]
    table["accuracy"] = summary.get(column, math.nan)
    table["run"] = names
    for name in (*BUDGETS, *COSTS, "target_images"):
        table[name] = summary.get(name, math.nan)
    split_seeds = [experiments[run].data.seed_of_splits for run in names]
    table["split_seed"] = summary.get("split_seed", pd.Series(split_seeds))
    for name in filter(None, GROUPS):
        table[name] = _flags(summary, name)
    refuse_twice(table, experiments)
    numeric = ("accuracy", *BUDGETS, *COSTS)
    return table.astype(dict.fromkeys(numeric, float))


def _flags(summary: pd.DataFrame, group: str) -> pd.Series:
    """Which runs belong to a group of methods; records that do not say which are pooled have one such method."""
    if group in summary:
        return summary[group].astype(str) == "True"
    return (summary["method"] == "deepall") & (group == POOLED)


def run_labels(runs: Runs, by: Sequence[str] = ()) -> dict[str, str]:
    """The label of every run, with the values of the settings in `by`, and the method where several have one label."""
    labels = runs.labels()
    for run, values in variants(runs.comparable, by, runs.unused_parts).items():
        if text := variant_text(by, values, labels[run]):
            labels[run] += f" ({text})"
    methods: dict[str, set[str]] = {}  # {label: the methods of its runs}
    for run, experiment in runs.experiments.items():
        of_label = methods.setdefault(labels[run], set())
        of_label.add(experiment.method_name)
    for run, experiment in runs.experiments.items():
        if len(methods[labels[run]]) > 1:
            labels[run] += f" [{experiment.method_name}]"
    return labels


def _baseline_label(table: pd.DataFrame, baseline: str | None) -> str:
    """The label of the baseline, which is given by its label or its method; empty without one."""
    if not baseline:
        return ""
    labels = list(dict.fromkeys(table["label"]))
    name = baseline.lower()
    named = [label for label in labels if label.lower() == name]
    if not named:
        of_method = table.loc[table["method"] == baseline, "label"]
        named = list(dict.fromkeys(of_method))
    if not named:
        near = nearest(baseline, labels)
        raise UserError(f"no run of the baseline {baseline!r}; {near}there are: {', '.join(labels)}")
    if len(named) > 1:
        raise UserError(f"the baseline {baseline!r} has several rows, name one of them: {', '.join(named)}")
    return named[0]


def _cells(
    method: Mapping[str, Any], grid: pd.DataFrame, targets: list[str], averaged: list[str], by: Sequence[str]
) -> list[dict]:
    """The cells of one method: of each target, and of the average over some of them."""
    keys = {key: method[key] for key in ("label", "method", *by)}
    grid = grid.reindex(columns=targets)
    columns = {}
    for target in targets:
        columns[target] = grid[target].dropna()
    columns[AVERAGE] = per_seed_average(grid, averaged)
    cells = []
    for target, values in columns.items():
        seeds = frozenset(values.index)
        cells.append({**keys, "target": target, "over": seeds, **mean_and_std(values)})
    return cells


def _method(
    table: pd.DataFrame,
    label: str,
    grids: Grids,
    targets: list[str],
    base: str,
    by: Sequence[str],
) -> dict[str, Any]:
    """The numbers of one method, as a row of `Comparison.methods`; those next to a baseline where there is one."""
    runs = table[table["label"] == label]
    grid = grids[label]
    average = mean_and_std(per_seed_average(grid, targets))
    first = runs.iloc[0]
    row = {key: first[key] for key in ("label", "method", *by)}
    row["average"] = average["mean"]
    row["average_std"] = average["std"]
    row["seeds"] = average["seeds"]
    row["seeds_begun"] = runs["seed"].nunique()
    if base:
        row |= paired(grid, grids[base])
        if label == base:
            row |= {"difference": math.nan, "p_value": math.nan}
    amounts = runs[[*BUDGETS, *COSTS]]
    row |= amounts.mean().to_dict()
    if runs[POOLED].any():  # its messages stay in one process
        row |= {"bytes_down_per_round": math.nan, "bytes_up_per_round": math.nan}
    row["group"] = ""
    for name in filter(None, GROUPS):  # the last one counts
        row[name] = bool(runs[name].any())
        if row[name]:
            row["group"] = name
    row["group"] = row.pop("group")  # the last column
    return row
