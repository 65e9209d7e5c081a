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


@settings(max_examples=10, deadline=None)
@given(TABLES)
def test_incomplete_tables_without_a_baseline(cells):
    """Averages, ranks and notes of one comparison, which takes longer than all checks of it."""
    rows = rows_of(cells)
    comparison = compare(runs_of(rows), published=False)
    check_averages(rows, comparison)
    check_ranks(rows, comparison)
    check_notes(rows, comparison.notes)


def check_averages(rows, comparison):
    """Every method has the average of its own complete seeds, whatever the others lack."""
    expected = recomputed(rows)
    for row in comparison.methods.itertuples():
        own = expected[row.label]
        assert row.seeds == len(own)
        assert same(row.average, own.mean())
        assert same(row.average_std, own.std())
    shown = comparison.cells[comparison.cells["target"] != "average"]
    for cell in shown.itertuples():
        own = rows[(rows["m"] == cell.label) & (rows["t"] == cell.target)]["a"].dropna()
        assert cell.seeds == len(own)
        assert same(cell.mean, own.mean())


@settings(max_examples=10, deadline=None)
@given(TABLES)
def test_difference_p_and_rank_rest_on_the_same_pairs(cells):
    """They equal those of an inner join of the rows by target and seed; ranks never contradict differences."""
    rows = rows_of({("fedavg", "photo", 0): 0.5} | cells)
    methods = compare(runs_of(rows), baseline="fedavg", published=False).methods.set_index("label")
    base = rows[rows["m"] == "fedavg"]
    scores = {}
    for method in set(rows["m"]):
        pairs = rows[rows["m"] == method].merge(base, on=["t", "s"], suffixes=("", "_base")).dropna()
        difference = (pairs["a"] - pairs["a_base"]).round(9)
        if pairs["t"].nunique() == rows["t"].nunique():
            scores[method] = difference.mean()
        if method == "fedavg":
            continue
        assert methods.loc[method, "pairs"] == len(pairs)
        assert same(methods.loc[method, "difference"], difference.mean())
        nonzero = difference[difference != 0]
        expected = wilcoxon(nonzero).pvalue if len(nonzero) else (1.0 if len(pairs) else math.nan)
        assert same(methods.loc[method, "p_value"], expected)
    ranked = methods["rank"].dropna()
    assert set(ranked.index) == set(scores)
    for method, rank in ranked.items():
        assert rank == 1 + sum(round(other - scores[method], 9) > 0 for other in scores.values())


def check_ranks(rows, comparison):
    """No choice of a shared seed ranks more methods; the ranks are those of the averages over the shared seeds."""
    averages = recomputed(rows)
    ranked = comparison.methods.set_index("label")["rank"].dropna()
    seeds = comparison.ranked_seeds[""]
    holders = [sum(seed in own.index for own in averages.values()) for seed in range(4)]
    assert len(ranked) == max(holders)
    assert all(set(seeds) <= set(averages[method].index) for method in ranked.index)
    scores = {method: averages[method][seeds].mean() for method in ranked.index}
    for method, rank in ranked.items():
        assert rank == 1 + sum(round(other - scores[method], 9) > 0 for other in scores.values())


def check_notes(rows, notes):
    """Notes name each method that lacks a cell of a seed that it has begun, and each seed that some methods lack."""
    missing = "".join(note for note in notes if note.startswith("Missing"))
    notes = "\n".join(notes)
    begun = rows.groupby("m")["s"].agg(set)
    have = set(rows.dropna()[["m", "t", "s"]].itertuples(index=False, name=None))
    for method, seeds in begun.items():
        lacks = any((method, target, seed) not in have for target in set(rows["t"]) for seed in seeds)
        assert lacks == (f" {method}: " in missing)
    for seed in set.union(*begun):
        assert (f"Seed {seed} is " in notes) == any(seed not in seeds for seeds in begun)
