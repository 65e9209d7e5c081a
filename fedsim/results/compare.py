"""One table of many runs: methods and unseen domains, with mean and sample standard deviation over seeds.

The average over domains is taken per seed first, then mean and standard deviation over the seeds. The spread of the
average is therefore the one that a new seed would show, and contains no spread between domains. A seed that lacks a
domain has no average. Difference, p and rank use only pairs of runs that both methods have: see `Comparison`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import task_of
from fedsim.data.benchmarks import AVERAGE
from fedsim.results.added_numbers import added_rows
from fedsim.results.agreement import order_notes
from fedsim.results.comparison import COSTS, GROUPS, Comparison
from fedsim.results.differences import refuse_twice, require_alike, variant_text, variants
from fedsim.results.metrics import METRICS, find_metric, metric_values
from fedsim.results.notes import comparison_notes, damaged_notes, part_notes, round_notes, without_notes
from fedsim.results.provenance import Environments, environments, provenance_notes, refuse_unlike
from fedsim.results.published import COLUMNS, beside
from fedsim.results.reading import Runs
from fedsim.results.selection import BUDGETS, RULES, rule_title
from fedsim.results.statistics import common_seeds, corrected, grid_of, mean_and_std, paired, per_seed_average, ranks
from fedsim.settings.experiment import Experiment

Grids = dict[str, pd.DataFrame]  # {label: its accuracies, seeds × targets}


def compare(
    runs: Runs,
    select: str = "best_validation",
    baseline: str | None = None,
    by: Sequence[str] = (),
    published: bool | Path = True,
    metric: str = "",
    correction: str = "holm",
) -> Comparison:
    """Comparison of all finished runs under one selection rule.

    metric: empty for the task's own (accuracy, Dice), or one from the kept predictions (`metrics.METRICS`).
    baseline: method or label that the others are compared with over the cells (target, seed) that both have.
    correction: "holm" adds `p_holm`, p corrected for testing all these methods against the baseline; or "none".
    published: whether the papers' numbers are shown; a path adds those of a file (`added_rows`).
    by: dotted settings in which the runs are meant to differ; each combination becomes a row of its own.
    Raises UserError if runs differ in anything but method, target, seed and `by`, or two runs fill the same cell.
    """
    if select not in RULES:
        raise UserError(f"unknown selection rule {select!r}; {nearest(select, RULES)}known: {', '.join(RULES)}")
    own = task_of(runs.summary, f"{select}_target_").metric
    metric = find_metric(metric or own, own)
    if runs.summary.empty:
        raise UserError(" ".join(["no finished run to compare.", *damaged_notes(runs.damaged)]))
    experiments = {run: runs.comparable[run] for run in runs.summary["run"]}
    require_alike(list(experiments.values()), by, runs.unused_parts)
    recorded = environments(runs)
    table = _rows(runs, experiments, by, f"{select}_target_{own}")
    refuse_unlike(runs, recorded, dict(zip(table["run"], table["label"])))
    reasons_without: list[str] = []
    if metric != own:
        values, reasons_without = metric_values(runs, metric, select)
        table["accuracy"] = table["run"].map(values)
    targets = _targets(table)
    cells, methods, base, ranked_seeds = numbers(table, targets, by, baseline, correction, metric)
    elsewhere, reasons = pd.DataFrame(columns=COLUMNS), list[str]()
    if published and METRICS[metric].primary:  # the papers print no other metric
        elsewhere, reasons = _beside(runs, recorded, table, targets, published)
    rule = rule_title(select, experiments.values())
    title = f"{', '.join(dict.fromkeys(runs.summary['experiment']))}: {rule}"
    result = Comparison(title, select, targets, cells, methods, elsewhere, base, ranked_seeds, [], metric, rule, table)
    result.notes = part_notes(runs.only) + comparison_notes(result, reasons, runs.unfinished)
    result.notes += damaged_notes(runs.damaged) + provenance_notes(recorded) + without_notes(reasons_without)
    result.notes += round_notes(runs, select)
    held_out = {experiment.run.validation_domain for experiment in experiments.values()} - {""}
    if held_out and select == "best_validation":
        result.notes.append(f"The round was selected on {', '.join(sorted(held_out))}, on which no one trained.")
    return result


def numbers(
    table: pd.DataFrame, targets: list[str], by: Sequence[str], baseline: str | None, correction: str, metric: str
) -> tuple[pd.DataFrame, pd.DataFrame, str, dict[str, list[int]]]:
    """(cells, methods, label of the baseline, seeds of each ranking) of a table with a row per run."""
    sign = -1 if METRICS[metric].less_is_better else 1
    grids = {label: grid_of(table, label) for label in dict.fromkeys(table["label"])}
    base = _baseline_label(table, baseline)

    def place(row: dict[str, Any]) -> tuple:
        """By group, the best average first. Labels that lack a target have no average and come last."""
        missing = math.isnan(row["average"])
        return GROUPS.index(row["group"]), missing, 0.0 if missing else -sign * row["average"], row["label"]

    rows = sorted((_method(table, label, grids, targets, base, by) for label in grids), key=place)
    methods = corrected(pd.DataFrame(rows), correction)
    cells = pd.DataFrame([cell for row in rows for cell in _cells(row, grids[row["label"]], targets, by)])
    methods, ranked_seeds = _with_ranks(methods, grids, targets, base, sign)
    return cells, methods, base, ranked_seeds


def _beside(
    runs: Runs, recorded: Environments, table: pd.DataFrame, targets: list[str], published: bool | Path
) -> tuple[pd.DataFrame, list[str]]:
    """The papers' rows beside these runs, whose settings are taken as they were given, and notes on them."""
    given = {run: runs.experiments[run] for run in table["run"]}
    first = next(iter(given.values()))
    rows, notes = beside(given, runs.labels(), dict(zip(table["run"], table["label"])), targets, recorded)
    notes += order_notes(table, first, targets)
    if isinstance(published, Path):
        added, more = added_rows(published, first, table["method"], targets)
        rows, notes = pd.concat([rows, added], ignore_index=True), notes + more
    return rows, notes


def _targets(table: pd.DataFrame) -> list[str]:
    targets = sorted(table["target"].unique(), key=_natural)
    if AVERAGE in targets:  # runs of versions that allowed it
        raise UserError(
            f"a domain is called {AVERAGE!r}, the name of the column of averages; choose --targets without it"
        )
    return targets


def _rows(runs: Runs, experiments: dict[str, Experiment], by: Sequence[str], column: str) -> pd.DataFrame:
    """One row per run: label, method, the values of `by`, target, seed, accuracy, budgets, costs, splits."""
    labels, values = run_labels(runs, by), variants(experiments, by, runs.unused_parts)
    rows = [
        {
            "label": labels[record["run"]],
            "method": record["method"],
            **dict(zip(by, values[record["run"]])),
            "target": record["target"],
            "seed": record["seed"],
            "accuracy": record.get(column, math.nan),
            "run": record["run"],
            **{name: record.get(name, math.nan) for name in (*BUDGETS, *COSTS, "target_images")},
            "split_seed": record.get("split_seed", experiments[record["run"]].data.seed_of_splits),
            **{name: str(record.get(name)) == "True" for name in GROUPS if name},
        }
        for record in runs.summary.to_dict("records")
    ]
    table = pd.DataFrame(rows)
    refuse_twice(table, experiments)
    return table.astype({"accuracy": float, **dict.fromkeys((*BUDGETS, *COSTS), float)})


def run_labels(runs: Runs, by: Sequence[str] = ()) -> dict[str, str]:
    """The label of every run, with the values of the settings in `by`, and the method where several have one label."""
    labels = runs.labels()
    for run, values in variants(runs.comparable, by, runs.unused_parts).items():
        if text := variant_text(by, values):
            labels[run] += f" ({text})"
    methods = {run: experiment.method_name for run, experiment in runs.experiments.items()}
    shared = Counter(label for label, _ in {(labels[run], method) for run, method in methods.items()})
    return {run: f"{label} [{methods[run]}]" if shared[label] > 1 else label for run, label in labels.items()}


def _natural(target: str) -> tuple:
    is_number = target.isascii() and target.replace(".", "", 1).isdigit()  # ² is a digit, too, but no number
    return (0, float(target), "") if is_number else (1, 0.0, target.lower())


def _baseline_label(table: pd.DataFrame, baseline: str | None) -> str:
    if not baseline:
        return ""
    labels = list(dict.fromkeys(table["label"]))
    exact = [label for label in labels if label.lower() == baseline.lower()]
    named = exact or list(dict.fromkeys(table.loc[table["method"] == baseline, "label"]))
    if not named:
        known = ", ".join(labels)
        raise UserError(f"no run of the baseline {baseline!r}; {nearest(baseline, labels)}there are: {known}")
    if len(named) > 1:
        raise UserError(f"the baseline {baseline!r} has several rows, name one of them: {', '.join(named)}")
    return named[0]


def _cells(row: Mapping[str, Any], grid: pd.DataFrame, targets: list[str], by: Sequence[str]) -> list[dict]:
    keys = {key: row[key] for key in ("label", "method", *by)}
    grid = grid.reindex(columns=targets)
    columns = {**{target: grid[target].dropna() for target in targets}, AVERAGE: per_seed_average(grid, targets)}
    return [
        keys | {"target": target, "over": frozenset(own.index)} | mean_and_std(own) for target, own in columns.items()
    ]


def _method(
    table: pd.DataFrame, label: str, grids: Grids, targets: list[str], base: str, by: Sequence[str]
) -> dict[str, Any]:
    rows, grid = table[table["label"] == label], grids[label]
    average = mean_and_std(per_seed_average(grid, targets))
    row = {key: rows.iloc[0][key] for key in ("label", "method", *by)}
    row |= {"average": average["mean"], "average_std": average["std"], "seeds": average["seeds"]}
    row["seeds_begun"] = rows["seed"].nunique()
    if base:
        row |= paired(grid, grids[base])
        if label == base:
            row |= {"difference": math.nan, "p_value": math.nan}
    row |= rows[[*BUDGETS, *COSTS]].mean().to_dict()
    uses = {name: bool(rows[name].any()) for name in GROUPS if name}
    return row | uses | {"group": next((name for name in reversed(uses) if uses[name]), "")}  # the strongest use counts


def _with_ranks(
    methods: pd.DataFrame, grids: Grids, targets: list[str], base: str, sign: int
) -> tuple[pd.DataFrame, dict[str, list[int]]]:
    """(the methods with their ranks inside their groups, {group: seeds that its ranking uses without a baseline})."""
    found: dict[str, float] = {}
    seeds: dict[str, list[int]] = {}
    for group, own in methods.groupby("group", sort=False):
        if base:
            differences = own.set_index("label")["difference"]
            differences[differences.index == base] = 0.0
            covered = own.set_index("label")["covers"].map(lambda seen: seen >= set(targets))
            found |= ranks(sign * differences.where(covered)).to_dict()
        else:
            averages = {label: per_seed_average(grids[label], targets) for label in own["label"]}
            labels, seeds[str(group)] = common_seeds(averages)
            scores = {label: averages[label][seeds[str(group)]].mean() for label in labels}
            found |= ranks(sign * pd.Series(scores, dtype=float)).to_dict()
    rank = methods["label"].map(found).astype("Int64")
    methods = methods.drop(columns="covers", errors="ignore")
    methods.insert(list(methods.columns).index("seeds_begun") + 1, "rank", rank)
    return methods, seeds
