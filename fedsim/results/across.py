"""Several data sets in one table, and tests of all pairs of methods over their unseen domains (Demšar, JMLR 2006)."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from fedsim.common.errors import UserError
from fedsim.results.compare import numbers
from fedsim.results.comparison import COSTS, GROUPS, Comparison, p_text
from fedsim.results.notes import rank_notes
from fedsim.results.published import COLUMNS
from fedsim.results.reading import Runs
from fedsim.results.selection import BUDGETS
from fedsim.results.statistics import grid_of, holm, paired, per_seed_average

LEVEL = 0.05


def refuse_one_data_set(parts: Mapping[str, Runs]) -> None:
    """UserError when two folders have runs on the same data, whose unseen domains would count twice."""
    seen: dict[tuple[str, str, str], str] = {}
    for name, runs in parts.items():
        for data in {(one.data.dataset, one.data.root, one.data.variant) for one in runs.experiments.values()}:
            if seen.setdefault(data, name) != name:
                raise UserError(
                    f"{seen[data]} and {name} have runs on the same data set, {data[0]}; compare one of them"
                )


def across(parts: Mapping[str, Comparison], baseline: str | None = None, correction: str = "holm") -> Comparison:
    """The comparisons of several data sets as one, whose columns are the data sets (DomainBed's headline table).

    parts: the comparison of each data set, all under one rule. A cell is the average over a data set's unseen domains,
    and the row's average is that over the data sets; both are taken per seed, as `compare` averages over domains.
    Raises UserError for parts with different metrics.
    """
    first = next(iter(parts.values()))
    for name, part in parts.items():
        if part.metric != first.metric:
            raise UserError(f"{name} is measured by {part.metric} not by {first.metric}; give --metric")
    table = pd.concat([_averages(name, part) for name, part in parts.items()], ignore_index=True)
    found = numbers(table, list(parts), (), baseline, correction, first.metric)
    result = Comparison(
        title=f"{len(parts)} data sets: {first.rule}",
        select=first.select,
        targets=list(parts),
        cells=found[0],
        methods=found[1],
        published=pd.DataFrame(columns=COLUMNS),
        baseline=found[2],
        ranked_seeds=found[3],
        metric=first.metric,
        rule=first.rule,
        table=table,
    )
    result.notes = _shared_notes(parts) + rank_notes(result, "data set")
    return result


def _shared_notes(parts: Mapping[str, Comparison]) -> list[str]:
    """The remarks of all data sets but those on their own ranks; one that several have is said once."""
    told: dict[str, list[str]] = {}
    for name, part in parts.items():
        for note in [note for note in part.notes if note not in rank_notes(part)]:
            told.setdefault(note, []).append(name)
    return [note if len(names) == len(parts) else f"{', '.join(names)}: {note}" for note, names in told.items()]


def _averages(name: str, part: Comparison) -> pd.DataFrame:
    """One row per method and complete seed of a data set, which is the row's target."""
    rows = []
    for label, own in part.table.groupby("label", sort=False):
        shared = {"label": label, "method": own["method"].iloc[0], "target": name}
        shared |= own[[*BUDGETS, *COSTS]].mean().to_dict() | {group: own[group].any() for group in GROUPS if group}
        average = per_seed_average(grid_of(part.table, str(label)), part.targets)
        rows += [shared | {"seed": seed, "accuracy": value} for seed, value in average.items()]
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Pairs:
    """Tests of every two methods over blocks; a block is one unseen domain of one data set.

    ranks: mean rank of each method over the blocks, 1 for the best; equal scores share the mean of their ranks
    tests: first (the better one), second, difference (first - second), p_value, p_holm; the least p first
    friedman: p of the hypothesis that all methods are alike; NaN for two methods
    left_out: the methods that lack a block, and are in no test
    """

    ranks: pd.Series
    tests: pd.DataFrame
    blocks: int
    friedman: float
    left_out: list[str]

    def differ(self, one: str, other: str) -> bool:
        """Whether the test of a pair is significant after Holm's correction."""
        pair = self.tests[self.tests["first"].isin([one, other]) & self.tests["second"].isin([one, other])]
        return bool((pair["p_holm"] < LEVEL).all())

    @property
    def groups(self) -> list[list[str]]:
        """The longest runs of neighbours in rank of which no two differ; a method alone is no group."""
        names: list[str] = list(self.ranks.index)
        found: list[tuple[int, int]] = []
        for start in range(len(names)):
            end = start + 1
            while end < len(names) and not any(self.differ(names[end], other) for other in names[start:end]):
                end += 1
            if end - start > 1 and not (found and found[-1][1] >= end):
                found.append((start, end))
        return [names[start:end] for start, end in found]


def pairs(parts: Mapping[str, Comparison]) -> Pairs:
    """Wilcoxon's signed-rank test of every two methods, with Holm's correction for all pairs, and Friedman's test.

    Seeds of one unseen domain share its images and are no independent blocks. A block is therefore the mean over the
    seeds that all its methods have. Raises UserError when fewer than two methods have all blocks, or no seed is
    shared.
    """
    grids = {
        f"{target} of {name}": own.pivot(index="seed", columns="label", values="accuracy")
        for name, part in parts.items()
        for target, own in part.table.groupby("target", sort=False)
    }
    labels = list(dict.fromkeys(label for grid in grids.values() for label in grid))
    whole = [label for label in labels if all(label in grid and grid[label].notna().any() for grid in grids.values())]
    if len(whole) < 2:
        raise UserError("no two methods have runs on every unseen domain of all data sets")
    shared = {block: grid[whole].dropna() for block, grid in grids.items()}
    if apart := next((block for block, own in shared.items() if own.empty), ""):
        raise UserError(
            f"{', '.join(whole)} have no seed in common on {apart}; leave some out with --methods or --seeds"
        )
    complete = pd.DataFrame([own.mean() for own in shared.values()])
    less_is_better = next(iter(parts.values())).measure.less_is_better
    ranks = complete.rank(axis="columns", ascending=less_is_better).mean().sort_values(kind="stable")
    rows = []
    for one, other in itertools.combinations(ranks.index, 2):
        found = paired(*(complete[label].to_frame("score").rename_axis(columns="target") for label in (one, other)))
        rows.append({"first": one, "second": other} | {key: found[key] for key in ("difference", "p_value")})
    tests = pd.DataFrame(rows)
    tests = tests.assign(p_holm=holm(tests["p_value"])).sort_values("p_value", kind="stable", ignore_index=True)
    left_out = [str(label) for label in labels if label not in complete]
    return Pairs(ranks, tests, len(complete), _friedman(complete), left_out)


def _friedman(scores: pd.DataFrame) -> float:
    from scipy.stats import friedmanchisquare

    alike = scores.nunique(axis="columns").max() == 1
    return float("nan") if scores.shape[1] < 3 or alike else float(friedmanchisquare(*scores.T.to_numpy()).pvalue)


def notes_on(found: Pairs) -> list[str]:
    """What the tests say, and what they cannot say with so few blocks."""
    count, tests = int((found.tests["p_holm"] < LEVEL).sum()), len(found.tests)
    ranked = ", ".join(f"{label} {rank:.2f}" for label, rank in found.ranks.items())
    lines = [f"Mean rank over {found.blocks} unseen domains: {ranked}."]
    lines.append(f"{count} of {tests} pairs differ (Wilcoxon over these domains, Holm over all pairs, {LEVEL}).")
    if pd.notna(found.friedman):
        lines[-1] += f" Friedman's p for all methods together: {p_text(found.friedman)}."
    if tests * 2.0 ** (1 - found.blocks) >= LEVEL:
        lines.append(f"With {found.blocks} domains and {tests} pairs no pair can differ, however large the difference.")
    if found.left_out:
        lines.append(f"Without all domains, and in no test: {', '.join(found.left_out)}.")
    return lines
