"""Several data sets in one table, and tests of all pairs of methods over their unseen domains (Demšar, JMLR 2006)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from fedsim.analysis.compare import numbers
from fedsim.analysis.comparison import COSTS, GROUPS, Comparison, p_text
from fedsim.analysis.notes import rank_notes, verdict_notes
from fedsim.analysis.published import COLUMNS
from fedsim.analysis.statistics import grid_of, holm, paired, per_seed_average
from fedsim.common.errors import UserError
from fedsim.common.lists import keys_of
from fedsim.records.reading import Runs
from fedsim.records.selection import BUDGETS, comparable

LEVEL = 0.05


def refuse_one_data_set(parts: Mapping[str, Runs]) -> None:
    """UserError when two folders have runs on the same data, whose unseen domains would count twice."""
    first: dict[tuple[str, str, str], str] = {}
    for name, runs in parts.items():
        for experiment in runs.experiments.values():
            data = experiment.data
            images = data.dataset, data.root, data.variant
            other = first.setdefault(images, name)
            if other != name:
                raise UserError(
                    f"{other} and {name} have runs on the same data set, {data.dataset}; compare one of them"
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
    averages = [_averages(name, part) for name, part in parts.items()]
    table = pd.concat(averages, ignore_index=True)
    computed = numbers(
        table,
        list(parts),
        (),
        baseline,
        correction,
        first.metric,
    )
    rule = _rule_of(parts)
    units = {part.unit for part in parts.values()}
    result = Comparison(
        title=f"{len(parts)} data sets: {rule}",
        select=first.select,
        targets=list(parts),
        published=pd.DataFrame(columns=COLUMNS),
        metric=first.metric,
        rule=rule,
        table=table,
        is_primary=first.is_primary,
        unit=units.pop() if len(units) == 1 else "examples",
        **computed._asdict(),
    )
    result.notes = [*verdict_notes(result, "data set"), *_shared_notes(parts), *rank_notes(result, "data set")]
    return result


def _rule_of(parts: Mapping[str, Comparison]) -> str:
    """The rule of all data sets in words, or that of each; it also says whose validation selects and who lies."""
    rules = dict.fromkeys(part.rule for part in parts.values())
    if len(rules) == 1:
        return next(iter(rules))
    return "; ".join(f"{name}: {part.rule}" for name, part in parts.items())


def _shared_notes(parts: Mapping[str, Comparison]) -> list[str]:
    """The notes of all data sets but their own verdicts and ranks; one that several have is said once."""
    names_by_note: dict[str, list[str]] = {}
    for name, part in parts.items():
        left_out = verdict_notes(part) + rank_notes(part)
        for note in part.notes:
            if note not in left_out:
                names_by_note.setdefault(note, []).append(name)
    notes = []
    for note, names in names_by_note.items():
        if len(names) < len(parts):
            note = f"{', '.join(names)}: {note}"
        notes.append(note)
    return notes


def _averages(name: str, part: Comparison) -> pd.DataFrame:
    """One row per method and complete seed of a data set, which is the row's target."""
    rows = []
    for label, runs in part.table.groupby("label", sort=False):
        shared = {
            "label": label,
            "method": runs["method"].iloc[0],
            "target": name,
        }
        amounts = runs[[*BUDGETS, *COSTS]]
        flags = runs[list(filter(None, GROUPS))]
        shared |= amounts.mean().to_dict()
        shared |= flags.any().to_dict()
        grid = grid_of(part.table, str(label))
        average = per_seed_average(grid, part.defined)
        for seed, value in average.items():
            rows.append({**shared, "seed": seed, "accuracy": value})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Pairs:
    """Tests of every two methods over blocks; a block is one unseen domain of one data set.

    ranks: mean rank of each method over the blocks, 1 for the best; scores that are equal to nine digits share the
        mean of their ranks
    tests: first (the better one), second, difference (first - second), p_value, p_holm; the least p first
    friedman: p of the hypothesis that all methods are alike; NaN for two methods
    left_out: the methods that lack a block, and are in no test
    apart: those that are ranked separately, because they are not federated or use images of the unseen domain
    """

    ranks: pd.Series
    tests: pd.DataFrame
    blocks: int
    friedman: float
    left_out: list[str]
    apart: list[str] = field(default_factory=list)

    def differ(self, one: str, other: str) -> bool:
        """Whether the test of a pair is significant after Holm's correction."""
        both = [one, other]
        is_pair = self.tests[["first", "second"]].isin(both).all(axis="columns")
        p_values = self.tests.loc[is_pair, "p_holm"]
        return bool((p_values < LEVEL).all())

    def _differs_from_any(self, name: str, others: Sequence[str]) -> bool:
        return any(self.differ(name, other) for other in others)

    @property
    def groups(self) -> list[list[str]]:
        """The longest runs of neighbours in rank of which no two differ; a method alone is no group."""
        names: list[str] = list(self.ranks.index)
        groups: list[list[str]] = []
        last = 0  # where the group before ends
        for start in range(len(names)):
            end = start + 1
            while end < len(names) and not self._differs_from_any(names[end], names[start:end]):
                end += 1
            if end - start > 1 and end > last:
                groups.append(names[start:end])
                last = end
        return groups


def pairs(parts: Mapping[str, Comparison]) -> Pairs:
    """Wilcoxon's signed-rank test of every two methods, with Holm's correction for all pairs, and Friedman's test.

    Seeds of one unseen domain share its images and are no independent blocks. A block is therefore the mean over the
    seeds that all its methods have. Raises UserError when fewer than two methods have all blocks, or no seed is
    shared.
    """
    group, apart = _one_group(parts)
    scores, left_out = _scores_of_blocks(parts, group)
    measure = next(iter(parts.values())).measure
    rounded = comparable(scores)
    ranks_of_blocks = rounded.rank(axis="columns", ascending=measure.less_is_better)
    ranks = ranks_of_blocks.mean().sort_values(kind="stable")
    rows = []
    for first, second in itertools.combinations(ranks.index, 2):
        test = paired(_column(scores, first), _column(scores, second))
        rows.append(
            {
                "first": first,
                "second": second,
                "difference": test["difference"],
                "p_value": test["p_value"],
            }
        )
    tests = pd.DataFrame(rows)
    tests["p_holm"] = holm(tests["p_value"])
    tests = tests.sort_values("p_value", kind="stable", ignore_index=True)
    return Pairs(ranks, tests, len(scores), _friedman(rounded), left_out, apart)


def _column(scores: pd.DataFrame, label: str) -> pd.DataFrame:
    """Return the scores of one method in the form of a grid with a single column."""
    return scores[label].to_frame("score").rename_axis(columns="target")


def _one_group(parts: Mapping[str, Comparison]) -> tuple[list[str], list[str]]:
    """(the methods of the first group that has two, the other methods); groups are ranked separately."""
    group_of: dict[str, str] = {}
    for part in parts.values():
        group_of |= dict(zip(part.methods["label"], part.methods["group"]))
    for group in GROUPS:
        members = [label for label in group_of if group_of[label] == group]
        if len(members) > 1:
            return members, [label for label in group_of if group_of[label] != group]
    return list(group_of), []


def _scores_of_blocks(parts: Mapping[str, Comparison], methods: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """(blocks × those of some methods that have all blocks, those that lack one); means over the seeds that all have.

    Blocks are the unseen domains on which the metric is defined. Raises UserError as `pairs` does.
    """
    grids = {}  # {block: seeds × methods}
    for name, part in parts.items():
        for target, runs in part.table.groupby("target", sort=False):
            if target in part.undefined:
                continue
            block = f"{target} of {name}"
            grids[block] = runs.pivot(index="seed", columns="label", values="accuracy")
    labels = [label for label in keys_of(grids.values()) if label in methods]
    complete = []
    for label in labels:
        if all(_has_scores(grid, label) for grid in grids.values()):
            complete.append(label)
    if len(complete) < 2:
        raise UserError("no two methods have runs on every unseen domain of all data sets")
    means = []
    for block, grid in grids.items():
        shared = grid[complete].dropna()
        if shared.empty:
            raise UserError(
                f"{', '.join(complete)} have no seed in common on {block}; leave some out with --methods or --seeds"
            )
        means.append(shared.mean())
    left_out = [str(label) for label in labels if label not in complete]
    return pd.DataFrame(means), left_out


def _has_scores(grid: pd.DataFrame, label: str) -> bool:
    if label not in grid:
        return False
    return bool(grid[label].notna().any())


def _friedman(scores: pd.DataFrame) -> float:
    """p of Friedman's test of blocks × methods; NaN for two methods, and where all are equal in every block."""
    from scipy.stats import friedmanchisquare

    alike = scores.nunique(axis="columns").max() == 1
    if scores.shape[1] < 3 or alike:
        return float("nan")
    return float(friedmanchisquare(*scores.T.to_numpy()).pvalue)


def notes_on(pairs: Pairs) -> list[str]:
    """What the tests say, and what they cannot say with so few blocks."""
    blocks, tests = pairs.blocks, len(pairs.tests)
    differing = int((pairs.tests["p_holm"] < LEVEL).sum())
    texts = []
    for label, rank in pairs.ranks.items():
        texts.append(f"{label} {rank:.2f}")
    ranked = ", ".join(texts)
    result = f"{differing} of {tests} pairs differ (Wilcoxon over these domains, Holm over all pairs, {LEVEL})."
    if pd.notna(pairs.friedman):
        result += f" Friedman's p for all methods together: {p_text(pairs.friedman)}."
    lines = [f"Mean rank over {blocks} unseen domains: {ranked}.", result]
    if tests * 2.0 ** (1 - blocks) >= LEVEL:
        lines.append(f"With {blocks} domains and {tests} pairs no pair can differ, however large the difference.")
    if pairs.left_out:
        lines.append(f"Without all domains, and in no test: {', '.join(pairs.left_out)}.")
    if pairs.apart:
        lines.append(f"Ranked separately, and in no test: {', '.join(pairs.apart)}.")
    return lines
