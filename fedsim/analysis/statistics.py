"""Arithmetic of a comparison: per-seed averages, paired differences, ranks, costs. These are pure functions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedsim.common.errors import UserError
from fedsim.records.selection import comparable


def grid_of(table: pd.DataFrame, label: str) -> pd.DataFrame:
    """Accuracies of one row of a comparison, seeds × targets; NaN where there is no run or no accuracy."""
    runs = table[table["label"] == label]
    return runs.pivot(index="seed", columns="target", values="accuracy")


def per_seed_average(grid: pd.DataFrame, targets: Sequence[str]) -> pd.Series:
    """Average over all targets for each complete seed: one that has an accuracy for every target."""
    complete = grid.reindex(columns=targets).dropna()
    return complete.mean(axis=1)


def shared_targets(cells: pd.DataFrame, targets: Sequence[str]) -> list[str]:
    """Those of some targets on which every row has a mean; cells: those of a comparison."""
    with_mean = cells.dropna(subset=["mean"])
    rows = with_mean.groupby("target")["label"].nunique()
    return [target for target in targets if rows.get(target, 0) == cells["label"].nunique()]


def worst_means(cells: pd.DataFrame, targets: Sequence[str], less_is_better: bool = False) -> pd.Series:
    """Return {label: its worst mean over seeds among some targets}; cells: those of a comparison.

    The worst mean is the least one, and the greatest one of a metric of which less is better.
    """
    means = cells[cells["target"].isin(targets)].groupby("label")["mean"]
    return means.max() if less_is_better else means.min()


def mean_and_std(values: pd.Series) -> dict[str, Any]:
    """{mean, std, seeds}: seeds is the number of values, std their sample standard deviation (NaN below two values)."""
    values = values.dropna()
    return {
        "mean": float(values.mean()),
        "std": float(values.std(ddof=1)),
        "seeds": len(values),
    }


def paired(ours: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any]:
    """Difference and test over the pairs: the cells (seed, target) that both grids have.

    difference: mean of ours - base over the pairs. p_value: two-sided Wilcoxon signed-rank test over the same pairs,
    zeros dropped. pairs: their number. differing: the number of pairs that are not equal. covers: the targets that
    have a pair.
    """
    cells = (ours - base).stack().dropna()
    values = cells.to_numpy(dtype=float)
    sizes = comparable(np.abs(values))
    differences = np.sign(values) * sizes  # the same for both signs
    nonzero = differences[differences != 0]
    p_value = math.nan
    if len(nonzero):
        # SciPy's statistics take a second to import, and runs that only write records import this package too.
        from scipy.stats import wilcoxon

        p_value = float(wilcoxon(nonzero).pvalue)
    elif len(differences):
        p_value = 1.0  # SciPy would return NaN, but when all cells are equal there is no evidence of a difference
    result: dict[str, Any] = {
        "difference": math.nan,
        "p_value": p_value,
        "pairs": len(differences),
        "differing": len(nonzero),
        "covers": frozenset(),
    }
    if len(differences):
        targets = cells.index.get_level_values("target")
        result["difference"] = float(differences.mean())
        result["covers"] = frozenset(targets)
    return result


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """(mean, lower bound, upper bound): the mean's 95 % interval by Student's t; the bounds are NaN below two values.

    It takes the values as independent draws, which cells with shared source data are not.
    """
    count = len(differences)
    mean = float(np.mean(differences)) if count else math.nan
    if count < 2:
        return mean, math.nan, math.nan
    from scipy.special import stdtrit

    std = float(np.std(differences, ddof=1))
    quantile = stdtrit(count - 1, 0.975)
    half = quantile * std / math.sqrt(count)
    return mean, mean - half, mean + half


def holm(p_values: pd.Series) -> pd.Series:
    """Holm's p for a family of tests: max over j <= i of min(1, (m - j + 1) p_(j)), in ascending order of the m values.

    A value that is missing is no test. Source: Holm (Scandinavian Journal of Statistics, 1979).
    """
    ordered = p_values.dropna().sort_values()
    factors = np.arange(len(ordered), 0, -1)
    multiplied = ordered * factors
    corrected = multiplied.clip(upper=1).cummax()
    return corrected.reindex(p_values.index)


def corrected(methods: pd.DataFrame, correction: str) -> pd.DataFrame:
    """The rows of a comparison with the column `p_holm` next to `p_value` where the correction is "holm"."""
    if correction not in ("holm", "none"):
        raise UserError(f"unknown correction {correction!r}; known: holm, none")
    if correction == "holm" and "p_value" in methods:
        place = methods.columns.get_loc("p_value") + 1
        methods.insert(place, "p_holm", holm(methods["p_value"]))
    return methods


def common_seeds(averages: Mapping[str, pd.Series]) -> tuple[list[str], list[int]]:
    """(methods, seeds) that a ranking without a baseline uses.

    averages: per-seed averages of each method. The methods are as many as possible that share a seed; of several such
    choices, the one with the most shared seeds. The seeds are all that these methods share. Both are empty when no
    method has a complete seed.
    """
    seeds = {}
    for label, values in averages.items():
        seeds[label] = set(values.index)
    methods: list[str] = []
    shared: list[int] = []
    for seed in sorted(set().union(*seeds.values())):
        holders = [label for label in seeds if seed in seeds[label]]
        seeds_of_holders = [seeds[label] for label in holders]
        common = sorted(set.intersection(*seeds_of_holders))
        if (len(holders), len(common)) > (len(methods), len(shared)):
            methods = holders
            shared = common
    return methods, shared


def ranks(scores: pd.Series) -> pd.Series:
    """Ranks, 1 for the greatest score; equal scores share the better rank, NaN has no rank."""
    rounded = comparable(scores.astype(float))
    return rounded.rank(ascending=False, method="min")


def whole_run_costs(rounds: pd.DataFrame) -> pd.DataFrame:
    """Gigabytes and minutes of one whole run, as means over the runs of a label; rounds: label, run, costs."""
    names = ["bytes_down", "bytes_up", "round_seconds"]
    columns = [column for column in names if column in rounds]
    by_run = rounds.groupby(["label", "run"])
    runs = by_run[columns].sum(min_count=1)
    totals = runs.groupby("label").mean()
    totals = totals.reindex(columns=names)
    size = totals["bytes_down"] + totals["bytes_up"]
    return pd.DataFrame(
        {
            "gigabytes": size / 1e9,
            "minutes": totals["round_seconds"] / 60,
        }
    )


def most_seeds(rows: pd.DataFrame) -> int:
    """The largest number of seeds of one method; rows: label and seed."""
    seeds = rows.groupby("label")["seed"]
    return int(seeds.nunique().max())


def over_seeds(seeds: int) -> str:
    """What a point of a figure or table is, in words; one seed has neither mean nor deviation."""
    return "mean ± std over seeds" if seeds > 1 else "one seed"
