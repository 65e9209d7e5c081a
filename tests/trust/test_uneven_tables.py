"""Tables in which runs are missing at random, compared with a plain computation; rounds that few clients validate."""

import math
from functools import cache

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invented import pacs_experiment
from scipy.stats import wilcoxon
from support import interrupt, numbers, run_small, small_experiment

from fedsim.analysis import compare
from fedsim.records import Runs
from fedsim.settings import TrainSettings
from strategies.participation import trainers, validators

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


CLIENTS = [f"c{number}" for number in range(12)]


@given(
    st.integers(0, 15), st.sampled_from(["all", "drawn", "1", "5", "12", "500"]), st.integers(1, 7), st.integers(1, 20),
    st.integers(0, 3),
)  # fmt: skip
def test_who_validates(per_round, which, every, round, seed):
    train = TrainSettings(clients_per_round=per_round, evaluate_clients=which, evaluate_every=every, rounds=20)
    drawn = trainers(train, CLIENTS, seed, round)
    chosen = validators(train, CLIENTS, drawn, seed, round)
    assert len(drawn) == (min(per_round, 12) or 12)
    assert drawn == [client for client in CLIENTS if client in drawn]
    if round % every and round != 20:
        assert chosen == []
    elif which == "drawn":
        assert chosen == drawn
    else:
        assert len(chosen) == (12 if which == "all" else min(int(which), 12))
        later = validators(train, CLIENTS, trainers(train, CLIENTS, seed, 20), seed, 20)
        assert chosen == later  # the same in every round
        assert chosen == [client for client in CLIENTS if client in chosen]


def many(folder, **train):
    data = {"clients_per_domain": 4, "fraction": 0.3}
    return small_experiment(folder, data=data, train={"rounds": 3, "iterations": 1, "clients_per_round": 3, **train})


@pytest.mark.parametrize(("train", "validated"), [
    ({"evaluate_clients": "5"}, [5, 5, 5]), ({"evaluate_clients": "drawn", "evaluate_every": 2}, [0, 3, 3]),
])  # fmt: skip
def test_messages_and_records_say_who_validated(train, validated, tmp_path):
    """Twelve clients, of which three train in a round; a run that is stopped after round 2 has the same records."""
    folder, grid = run_small(many(tmp_path / "whole", **train))
    rounds = numbers(folder / "rounds.csv").set_index("round").loc[1:]
    assert list(rounds["validated"]) == validated
    assert list(rounds["mean_validation_accuracy"].notna()) == [count > 0 for count in validated]
    asked = [sent.content["config"]["round"] for sent, _ in grid.seen if sent.metadata.message_type == "evaluate"]
    assert [asked.count(round) for round in (1, 2, 3)] == validated
    best = numbers(folder / "summary.csv")["best_validation_round"][0]
    assert best == rounds["mean_validation_accuracy"].idxmax()
    interrupt(many(tmp_path / "cut", **train), 2)
    cut, _ = run_small(many(tmp_path / "cut", **train))
    assert (cut / "best.safetensors").read_bytes() == (folder / "best.safetensors").read_bytes()
    assert numbers(cut / "rounds.csv").set_index("round").loc[1:].equals(rounds)
