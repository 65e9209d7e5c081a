"""Tables in which seeds, targets and numbers are missing at random, compared with a plain computation from the rows."""

import math
from functools import cache

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from results.invented import pacs_experiment
from scipy.stats import wilcoxon

from fedsim.results import Runs, compare

METHODS = ("fedavg", "csac", "fedbn", "fedsb")
TARGETS = ("art_painting", "photo", "sketch")
CELLS = st.tuples(st.sampled_from(METHODS), st.sampled_from(TARGETS), st.integers(0, 3))
# Accuracies of 200 images; some runs have diverged (NaN).
ACCURACY = st.one_of(st.integers(0, 200).map(lambda correct: correct / 200), st.just(math.nan))
TABLES = st.dictionaries(CELLS, ACCURACY, min_size=1, max_size=48)
experiment_of = cache(pacs_experiment)  # reading the settings of 48 runs takes longer than comparing them


def rows_of(cells):
    return pd.DataFrame([(*key, value) for key, value in cells.items()], columns=["m", "t", "s", "a"])


def runs_of(rows):
    keys = [f"{row.m}/{row.t}/seed{row.s}" for row in rows.itertuples()]
    experiments = {key: experiment_of(row.m, row.t, row.s) for key, row in zip(keys, rows.itertuples())}
    summary = pd.DataFrame({"run": keys, "experiment": "pacs", "method": rows["m"], "target": rows["t"]})
    summary = summary.assign(seed=rows["s"], label=rows["m"], best_validation_target_accuracy=rows["a"])
    empty = pd.DataFrame()
    return Runs(summary, empty, empty, empty, experiments)


def same(found, expected):
    return found == pytest.approx(expected, abs=1e-9, nan_ok=True)


def recomputed(rows):
    """{method: (average, complete seeds)} over the targets of the whole table."""
    targets = rows["t"].nunique()
    averages = {}
    for method, own in rows.groupby("m"):
        kept = own.dropna().groupby("s").filter(lambda seed: seed["t"].nunique() == targets)
        averages[method] = kept.groupby("s")["a"].mean()
    return averages


@settings(max_examples=15)
@given(TABLES)
def test_averages_differences_and_ranks_rest_on_complete_seeds_and_the_same_pairs(cells):
    """Averages are over a method's own complete seeds; difference, p and rank equal those of an inner join of the rows
    by target and seed."""
    rows = rows_of({("fedavg", "photo", 0): 0.5} | cells)
    comparison = compare(runs_of(rows), baseline="fedavg", published=False)
    methods, averages = comparison.methods.set_index("label"), recomputed(rows)
    base, scores = rows[rows["m"] == "fedavg"], {}
    for method in set(rows["m"]):
        found = methods.loc[method]
        assert found["seeds"] == len(averages[method])
        assert same(found["average"], averages[method].mean())
        assert same(found["average_std"], averages[method].std())
        pairs = rows[rows["m"] == method].merge(base, on=["t", "s"], suffixes=("", "_base")).dropna()
        difference = (pairs["a"] - pairs["a_base"]).round(9)
        if pairs["t"].nunique() == rows["t"].nunique():
            scores[method] = difference.mean()
        if method != "fedavg":
            assert found["pairs"] == len(pairs)
            assert same(found["difference"], difference.mean())
            nonzero = difference[difference != 0]
            expected = wilcoxon(nonzero).pvalue if len(nonzero) else (1.0 if len(pairs) else math.nan)
            assert same(found["p_value"], expected)
    check_ranks(methods["rank"].dropna(), scores)


def check_ranks(ranked, scores):
    assert set(ranked.index) == set(scores)
    for method, rank in ranked.items():
        assert rank == 1 + sum(round(other - scores[method], 9) > 0 for other in scores.values())


@settings(max_examples=10)
@given(TABLES)
def test_ranks_without_a_baseline_share_seeds_and_notes_name_what_is_missing(cells):
    """No choice of a shared seed ranks more methods."""
    rows = rows_of(cells)
    comparison, averages = compare(runs_of(rows), published=False), recomputed(rows)
    ranked, seeds = comparison.methods.set_index("label")["rank"].dropna(), comparison.ranked_seeds[""]
    assert len(ranked) == max(sum(seed in own.index for own in averages.values()) for seed in range(4))
    assert all(set(seeds) <= set(averages[method].index) for method in ranked.index)
    check_ranks(ranked, {method: averages[method][seeds].mean() for method in ranked.index})
    missing = "".join(note for note in comparison.notes if note.startswith("Missing"))
    begun = rows.groupby("m")["s"].agg(set)
    have = set(rows.dropna()[["m", "t", "s"]].itertuples(index=False, name=None))
    for method, own in begun.items():
        lacks = any((method, target, seed) not in have for target in set(rows["t"]) for seed in own)
        assert lacks == (f" {method}: " in missing)
    for seed in set.union(*begun):
        assert (f"Seed {seed} is " in "\n".join(comparison.notes)) == any(seed not in own for own in begun)
