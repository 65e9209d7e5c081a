"""Many runs -> one table: methods against unseen domains, mean and sample standard deviation over seeds.

The average over domains is taken per seed first, then mean and standard deviation over the seeds; the spread of the
average is therefore the spread that a new seed would show, not a mix of seeds and domains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from fedsim.errors import UserError
from fedsim.experiment import Experiment, nearest
from fedsim.results.differences import require_alike, variant, variant_text
from fedsim.results.published import paper_notes, published_rows, setting
from fedsim.results.reading import Runs
from fedsim.results.selection import RULE_TITLES, RULES

FEWEST_PAIRS = 6
COSTS = ("bytes_down_per_round", "bytes_up_per_round", "seconds_per_round")


@dataclass
class Comparison:
    """A comparison of methods; `render` and `show` print it.

    cells: one row per method and target (`average` included): label, method, the keys of `by`, target, mean, std,
    seeds.
    methods: one row per method: label, method, the keys of `by`, average, average_std, seeds, rank, difference,
    p_value, pairs, bytes_down_per_round, bytes_up_per_round, seconds_per_round, transductive. `difference` is in
    accuracy (a fraction) against the baseline's average.
    published: numbers from papers for the same setting (label, method, source, target, mean, std).
    """

    title: str
    select: str
    targets: list[str]
    cells: pd.DataFrame
    methods: pd.DataFrame
    published: pd.DataFrame
    baseline: str = ""
    notes: list[str] = field(default_factory=list)

    def render(self, format: str = "table") -> str:
        """Text of the table as `table` (terminal), `csv`, `markdown` or `latex`."""
        from fedsim.results.tables import FORMATS

        if format not in FORMATS:
            raise UserError(f"unknown format {format!r}; {nearest(format, FORMATS)}known: {', '.join(FORMATS)}")
        return FORMATS[format](self)

    def show(self, console: Any = None) -> None:
        """Print the table to a rich console (the terminal by default)."""
        from fedsim.results.tables import print_table

        print_table(self, console)


def compare(
    runs: Runs,
    select: str = "best_validation",
    baseline: str | None = None,
    by: Sequence[str] = (),
    published: bool = True,
) -> Comparison:
    """Comparison of all finished runs under one selection rule.

    baseline: method or label that the others are compared with, by Wilcoxon's signed-rank test over (target, seed)
    cells.
    by: dotted settings in which the runs are meant to differ; each combination becomes a row of its own.
    Raises UserError if runs differ in anything but method, target, seed and `by`, or two runs fill the same cell.
    """
    if select not in RULES:
        raise UserError(f"unknown selection rule {select!r}; {nearest(select, RULES)}known: {', '.join(RULES)}")
    if runs.summary.empty:
        raise UserError("no finished run to compare")
    experiments = {run: runs.experiments[run] for run in runs.summary["run"]}
    require_alike(list(experiments.values()), by)
    table = _rows(runs, experiments, by, f"{select}_target_accuracy")
    targets = sorted(table["target"].unique(), key=_natural)
    labels = list(dict.fromkeys(table["label"]))
    common = [
        target
        for target in targets
        if table.dropna(subset="accuracy")
        .groupby("label")["target"]
        .agg(lambda seen, target=target: target in set(seen))
        .reindex(labels, fill_value=False)
        .all()
    ]
    base = _baseline_label(table, baseline)
    cells = pd.DataFrame([cell for label in labels for cell in _cells(table, label, targets, common, by)])
    methods = pd.DataFrame([_method(table, label, common, base, by) for label in labels])
    methods = _with_ranks(methods, base)
    elsewhere = _published(list(experiments.values()), table if published else table[:0], targets, common)
    notes = _notes(select, table, targets, common, methods, base, elsewhere, runs.unfinished)
    name = ", ".join(dict.fromkeys(runs.summary["experiment"]))
    return Comparison(f"{name}: {RULE_TITLES[select]}", select, targets, cells, methods, elsewhere, base, notes)


def _rows(runs: Runs, experiments: dict[str, Experiment], by: Sequence[str], column: str) -> pd.DataFrame:
    """One row per run: label, method, the values of `by`, target, seed, accuracy, costs."""
    everyone = list(experiments.values())
    variants = {run: variant(experiment, by, everyone) for run, experiment in experiments.items()}
    labels = runs.labels()
    rows = []
    for record in runs.summary.to_dict("records"):
        run, text = record["run"], variant_text(by, variants[record["run"]])
        label = f"{labels[run]} ({text})" if text else labels[run]
        costs = {name: record.get(name, math.nan) for name in COSTS}
        rows.append(
            {
                "label": label,
                "method": record["method"],
                **dict(zip(by, variants[run])),
                "target": record["target"],
                "seed": record["seed"],
                "accuracy": record.get(column, math.nan),
                "run": run,
                **costs,
                "transductive": str(record.get("transductive")) == "True",
            }
        )
    table = pd.DataFrame(rows)
    shared = table.groupby("label")["method"].transform("nunique") > 1
    table.loc[shared, "label"] = table["label"] + " [" + table["method"] + "]"
    twice = table[table.duplicated(["label", "target", "seed"], keep=False)]
    if len(twice):
        first = twice.iloc[0]
        same = twice[(twice[["label", "target", "seed"]] == first[["label", "target", "seed"]]).all(axis=1)]["run"]
        raise UserError(
            f"{first['label']} on {first['target']} with seed {first['seed']} is there more than once: "
            f"{', '.join(same)}; compare one experiment's folder at a time"
        )
    return table.astype({"accuracy": float})


def _natural(target: str) -> tuple:
    return (0, float(target), "") if target.replace(".", "", 1).isdigit() else (1, 0.0, target.lower())


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


def _grid(table: pd.DataFrame, label: str) -> pd.DataFrame:
    """Accuracy of one row of the table, seeds × targets; NaN where there is no run."""
    return table[table["label"] == label].pivot(index="seed", columns="target", values="accuracy")


def _per_seed_average(grid: pd.DataFrame, common: list[str]) -> pd.Series:
    """Average over the common targets for each seed that has them all."""
    return grid[common].dropna().mean(axis=1) if common else pd.Series(dtype=float)


def _statistics(values: pd.Series) -> dict[str, Any]:
    values = values.dropna()
    std = float(values.std(ddof=1)) if len(values) > 1 else math.nan
    return {"mean": float(values.mean()) if len(values) else math.nan, "std": std, "seeds": len(values)}


def _cells(table: pd.DataFrame, label: str, targets: list[str], common: list[str], by: Sequence[str]) -> list[dict]:
    grid = _grid(table, label).reindex(columns=targets)
    first = table[table["label"] == label].iloc[0]
    keys = {key: first[key] for key in ("label", "method", *by)}
    cells = [keys | {"target": target} | _statistics(grid[target]) for target in targets]
    return [*cells, keys | {"target": "average"} | _statistics(_per_seed_average(grid, common))]


def _method(table: pd.DataFrame, label: str, common: list[str], base: str, by: Sequence[str]) -> dict[str, Any]:
    rows = table[table["label"] == label]
    grid = _grid(table, label)
    average = _statistics(_per_seed_average(grid, common))
    row = {key: rows.iloc[0][key] for key in ("label", "method", *by)}
    row |= {"average": average["mean"], "average_std": average["std"], "seeds": average["seeds"]}
    if base:
        row |= signed_rank(grid, _grid(table, base)) if label != base else {"p_value": math.nan, "pairs": 0}
    costs = rows[list(COSTS)].astype(float).mean()
    return row | costs.to_dict() | {"transductive": bool(rows["transductive"].any())}


def signed_rank(ours: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any]:
    """Two-sided Wilcoxon signed-rank test over the (seed, target) cells that both grids have; zeros are dropped."""
    # SciPy's statistics take a second to import, and runs that only record import this package, too.
    from scipy.stats import wilcoxon

    # Accuracies are counts over counts: differences that are equal on paper must tie, not differ in the last bit.
    differences = (ours - base).to_numpy(dtype=float).round(12)
    differences = differences[np.isfinite(differences)]
    nonzero = differences[differences != 0]
    if not len(nonzero):
        # SciPy returns NaN without pairs; equal cells throughout are no evidence of a difference.
        return {"p_value": 1.0 if differences.size else math.nan, "pairs": 0}
    return {"p_value": float(wilcoxon(nonzero).pvalue), "pairs": len(nonzero)}


def _with_ranks(methods: pd.DataFrame, base: str) -> pd.DataFrame:
    rank = methods["average"].rank(ascending=False, method="min").astype("Int64")
    place = list(methods.columns).index("seeds") + 1
    methods.insert(place, "rank", rank)
    if base:
        average = methods.set_index("label").loc[base, "average"]
        methods.insert(place + 1, "difference", (methods["average"] - average).where(methods["label"] != base))
    return methods


def _published(
    experiments: list[Experiment], table: pd.DataFrame, targets: list[str], common: list[str]
) -> pd.DataFrame:
    # A table over several data sets or backbones (`by`) has no one setting that a paper's row could stand beside.
    alike = len({setting(experiment) for experiment in experiments}) == 1
    rows = published_rows(experiments[0], table["method"].unique() if alike else [], targets)
    return rows if len(common) == len(targets) else rows[rows["target"] != "average"]


def _notes(
    select: str,
    table: pd.DataFrame,
    targets: list[str],
    common: list[str],
    methods: pd.DataFrame,
    base: str,
    elsewhere: pd.DataFrame,
    unfinished: list[str],
) -> list[str]:
    notes = [
        "Accuracy on the unseen domain in %, mean ± sample standard deviation over seeds; "
        "averages are taken per seed first."
    ]
    if select == "oracle":
        notes.append("ORACLE: the round was chosen on the target's labels. An upper bound, not a result.")
    seeds = table["seed"].nunique()
    wanted = len(methods) * len(targets) * seeds
    missing = wanted - int(table["accuracy"].notna().sum())
    if missing:
        notes.append(f"{missing} of {wanted} cells (method, target, seed) are missing (\N{EN DASH} marks empty ones).")
    if len(common) < len(targets):
        shown = ", ".join(common) or "none"
        notes.append(f"Averages, ranks and differences rest on the targets present in all methods: {shown}.")
    if methods["seeds"].nunique() > 1:
        notes.append("Averages rest on different numbers of seeds; see the column of seeds.")
    if seeds == 1:
        notes.append("One seed: no standard deviation, differences may be noise.")
    if base:
        notes += _test_notes(methods[methods["label"] != base], base)
    if methods["transductive"].any():
        notes.append("† transductive: uses unlabelled images of the target at test time.")
    if len(elsewhere):
        notes.append("Published rows are from elsewhere: the papers' own protocol and seeds, not runs of this program.")
        notes += [f"{note}." for note in paper_notes(elsewhere["source"])]
    if unfinished:
        notes.append(f"{len(unfinished)} unfinished runs are left out.")
    return notes


def _test_notes(others: pd.DataFrame, base: str) -> list[str]:
    notes = [
        f"p: two-sided Wilcoxon signed-rank test against {base} over (target, seed) cells. Cells share source "
        "data and targets, so they are not independent: read p as a description, not as proof. No correction "
        "for testing several methods."
    ]
    few = others[others["pairs"] < FEWEST_PAIRS]
    if len(few):
        named = ", ".join(few["label"]) if len(few) < len(others) else "every method"
        notes.append(
            f"Fewer than {FEWEST_PAIRS} differing pairs for {named}: "
            "too few cells for any p < .05, whatever the difference."
        )
    return notes
