"""Comparison: numbers worked out by hand, runs that must not be mixed, and the notes."""

import math

import numpy as np
import pandas as pd
import pytest
from made_up_runs import cell, table_of_runs, two_methods

from fedsim.common.errors import UserError
from fedsim.results import compare
from fedsim.results.statistics import holm, paired


def test_means_and_sample_deviations():
    comparison = compare(two_methods())
    photo = cell(comparison, "fedavg", "photo")
    assert (photo["mean"], photo["std"], photo["seeds"]) == (pytest.approx(0.92), pytest.approx(0.02), 3)
    # Averages per seed: 0.75, 0.81, 0.795 -> mean 0.785, deviations -0.035, 0.025, 0.010, variance 0.00195 / 2.
    average = cell(comparison, "fedavg", "average")
    assert average["mean"] == pytest.approx(0.785)
    assert average["std"] == pytest.approx(math.sqrt(0.000975))
    # 0.835, 0.82, 0.85
    assert cell(comparison, "csac", "average")["std"] == pytest.approx(0.015)


def test_rank_difference_and_cost():
    methods = compare(two_methods(), baseline="fedavg").methods.set_index("label")
    assert methods["rank"].to_dict() == {"csac": 1, "fedavg": 2}
    assert methods.loc["csac", "difference"] == pytest.approx(0.835 - 0.785)
    assert math.isnan(methods.loc["fedavg", "difference"])
    assert methods.loc["csac", "seconds_per_round"] == pytest.approx(3.0)
    assert methods.loc["csac", "bytes_down_per_round"] == 3_000_000


def test_signed_rank_of_six_pairs_of_one_sign():
    # Differences 5, 1, 3, 12, 1, 8 points, all positive: exact two-sided p = 2 / 2**6 for distinct ranks.
    methods = compare(two_methods(), baseline="fedavg").methods.set_index("label")
    assert methods.loc["csac", "pairs"] == 6
    assert methods.loc["csac", "p_value"] == pytest.approx(2 / 64)


def test_holm_by_hand():
    """Of four tests: 4 * .01, then the larger of .04 and 3 * .01, then 2 * .04 and at last .9; a missing p is none."""
    p = pd.Series([0.04, 0.01, math.nan, 0.01, 0.9])
    assert holm(p).dropna().tolist() == pytest.approx([0.08, 0.04, 0.04, 0.9])
    assert holm(pd.Series([0.6, 0.7])).tolist() == [1.0, 1.0]


def exact_signed_rank(differences):
    """The p value without SciPy: the share of all sign patterns whose rank sum is at least as extreme."""
    ranks = np.argsort(np.argsort(np.abs(differences))) + 1
    patterns = np.array(np.meshgrid(*[[0, 1]] * len(ranks))).reshape(len(ranks), -1)
    sums = ranks @ patterns
    seen, total = ranks[np.array(differences) > 0].sum(), ranks.sum()
    return float(np.mean(np.minimum(sums, total - sums) <= min(seen, total - seen)))


def grid(values):
    return pd.DataFrame(values, columns=pd.Index(range(len(values[0])), name="target"))


@pytest.mark.parametrize("seed", range(5))
def test_signed_rank_equals_enumeration(seed):
    rng = np.random.default_rng(seed)
    ours, base = rng.random((3, 3)), rng.random((3, 3))
    found = paired(grid(ours), grid(base))
    assert found["p_value"] == pytest.approx(exact_signed_rank((ours - base).ravel()))
    assert found["difference"] == pytest.approx((ours - base).mean())
    assert (found["pairs"], found["differing"], found["covers"]) == (9, 9, {0, 1, 2})


def test_signed_rank_without_evidence():
    same = grid([[0.5, 0.6]])
    found = paired(same, same)
    assert (found["p_value"], found["difference"], found["pairs"], found["differing"]) == (1.0, 0.0, 2, 0)
    none = paired(same, same * math.nan)
    assert math.isnan(none["p_value"])
    assert math.isnan(none["difference"])
    assert (none["pairs"], none["covers"]) == (0, frozenset())


def test_few_pairs_are_admitted():
    few = compare(table_of_runs({("fedavg", "photo", 0): 0.5, ("csac", "photo", 0): 0.6}), baseline="fedavg")
    assert any("too few cells for any p < .05" in note for note in few.notes)
    assert any("not independent" in note for note in few.notes)
    assert any("One seed" in note for note in few.notes)
    assert math.isnan(few.cells["std"].iloc[0])
    six = compare(two_methods(), baseline="fedavg")
    assert not any("too few" in note for note in six.notes)


def test_an_incomplete_method_leaves_the_others_their_average():
    accuracies = {
        ("fedavg", "photo", 0): 0.9,
        ("fedavg", "photo", 1): 0.8,
        ("fedavg", "sketch", 0): 0.6,
        ("fedavg", "sketch", 1): 0.5,
        ("fedbn", "photo", 0): 0.9,
        ("fedbn", "sketch", 0): 0.8,
        ("fedbn", "photo", 1): math.nan,
        ("fedbn", "sketch", 1): 0.4,
        ("csac", "photo", 0): 0.95,
        ("csac", "photo", 1): 0.95,
    }
    comparison = compare(table_of_runs(accuracies), baseline="fedavg")
    methods = comparison.methods.set_index("label")
    assert cell(comparison, "fedavg", "average")["mean"] == pytest.approx(0.7)
    assert methods["seeds"].to_dict() == {"fedavg": 2, "fedbn": 1, "csac": 0}
    # fedbn: pairs photo 0 (0), sketch 0 (+20), sketch 1 (-10); csac on photo alone: +5 and +15, and no rank.
    assert methods["pairs"].to_dict() == {"fedavg": 4, "fedbn": 3, "csac": 2}
    assert methods.loc["fedbn", "difference"] == pytest.approx(0.1 / 3)
    assert methods.loc["csac", "difference"] == pytest.approx(0.1)
    assert methods["rank"].fillna(0).to_dict() == {"fedavg": 2, "fedbn": 1, "csac": 0}
    (missing,) = (note for note in comparison.notes if note.startswith("Missing"))
    assert missing.endswith("fedbn: photo (seed 1); csac: sketch (every seed).")
    assert any(note.startswith("Without a rank: csac") for note in comparison.notes)
    text = comparison.render("markdown")
    assert "\N{EN DASH}" in text
    assert "| 1 of 2 |" in text


def test_difference_and_rank_are_paired_where_seeds_are_uneven():
    """FedAvg has a third, easy seed: the difference of the averages is -1.5 points, that of the pairs +2."""
    accuracies = {
        ("fedavg", "photo", 0): 0.70,
        ("fedavg", "photo", 1): 0.70,
        ("fedavg", "photo", 2): 0.805,
        ("csac", "photo", 0): 0.72,
        ("csac", "photo", 1): 0.72,
    }
    with_base = compare(table_of_runs(accuracies), baseline="fedavg")
    csac = with_base.methods.set_index("label").loc["csac"]
    assert csac["average"] - with_base.methods.set_index("label").loc["fedavg", "average"] == pytest.approx(-0.015)
    assert (csac["difference"], csac["pairs"], csac["rank"]) == (pytest.approx(0.02), 2, 1)
    assert any("Seed 2 is only in fedavg" in note for note in with_base.notes)
    assert "| 2 |" in with_base.render("markdown").splitlines()[5]
    alone = compare(table_of_runs(accuracies))
    assert alone.methods.set_index("label")["rank"].to_dict() == {"fedavg": 2, "csac": 1}
    assert any("Ranks rest on the seeds that all ranked methods have: 0, 1." in note for note in alone.notes)


def test_no_common_seed_leaves_a_method_unranked():
    accuracies = {("fedavg", "photo", 0): 0.5, ("fedbn", "photo", 0): 0.6, ("csac", "photo", 7): 0.9}
    comparison = compare(table_of_runs(accuracies))
    assert comparison.methods.set_index("label")["rank"].fillna(0).to_dict() == {"fedavg": 2, "fedbn": 1, "csac": 0}
    assert any(note.startswith("Without a rank: csac") for note in comparison.notes)


def test_no_complete_seed_gives_no_average():
    comparison = compare(table_of_runs({("fedavg", "photo", 0): 0.9, ("csac", "sketch", 0): 0.6}), baseline="fedavg")
    assert comparison.methods["average"].isna().all()
    assert comparison.methods["difference"].isna().all()
    for format in ("table", "csv", "markdown", "latex"):
        assert comparison.render(format)


@pytest.mark.parametrize(("column", "sign"), [("transductive", "†"), ("uses_target_unlabelled", "‡")])
def test_methods_that_see_target_images_are_ranked_apart(column, sign):
    accuracies = {
        (method, "photo", seed): value
        for method, value in (("fedig-a", 0.99), ("fedavg", 0.5), ("tent", 0.98), ("csac", 0.6))
        for seed in range(2)
    }
    runs = table_of_runs(accuracies)
    runs.summary["transductive"] = False
    runs.summary[column] = runs.summary["method"].isin(["fedig-a", "tent"])
    for baseline in (None, "fedavg"):
        comparison = compare(runs, baseline=baseline)
        assert list(comparison.methods["label"]) == ["csac", "fedavg", "fedig-a", "tent"]
        assert list(comparison.methods["rank"]) == [1, 2, 1, 2]
        assert any(note.startswith(sign) and "ranked apart" in note for note in comparison.notes)
        lines = comparison.render("markdown").splitlines()
        assert f"fedig-a {sign} | 99.0" in lines[6]  # not bold: the column's best is csac's
        assert f"| 1 {sign} |" in lines[6]
        assert "**60.0**" in lines[4]


def test_budgets_are_columns_and_differences_are_said():
    runs = two_methods()
    assert "Images" not in compare(runs).render("markdown")
    runs.summary["images"] = np.where(runs.summary["method"] == "csac", 20_800, 13_000)
    runs.summary["steps"] = 200
    comparison = compare(runs)
    assert "| Images | Steps |" in comparison.render("markdown")
    assert "| 20,800 | 200 |" in comparison.render("markdown")
    (note,) = (note for note in comparison.notes if note.startswith("Budgets differ"))
    assert "beside the images of fedavg, csac 1.6 times;" in note
    (note,) = (note for note in compare(runs, baseline="csac").notes if note.startswith("Budgets differ"))
    assert "beside the images of csac, fedavg 0.62 times;" in note


def test_same_splits_are_said():
    runs = two_methods()
    runs.summary["split_seed"] = runs.summary["seed"]
    assert not any("Same splits" in note for note in compare(runs).notes)
    runs.summary["split_seed"] = 0
    assert any(note.startswith("Same splits for all seeds (all methods)") for note in compare(runs).notes)
    runs.summary["split_seed"] = runs.summary["seed"].where(runs.summary["method"] == "csac", 3)
    assert any(note.startswith("Same splits for all seeds (fedavg)") for note in compare(runs).notes)


def test_oracle_is_labelled():
    comparison = compare(two_methods(), select="oracle")
    assert "ORACLE" in comparison.title
    assert any("upper bound" in note for note in comparison.notes)
    assert cell(comparison, "fedavg", "photo")["mean"] == pytest.approx(0.93)


def test_old_runs_on_a_domain_called_average_are_refused():
    """The average over domains would be shown as the number of this one."""
    runs = table_of_runs({("fedavg", "average", 0): 0.5, ("fedavg", "photo", 0): 0.7})
    with pytest.raises(UserError, match="a domain is called 'average'"):
        compare(runs)


def test_a_domain_like_a_power_is_a_name():
    """`²`.isdigit() is true, but it is no number."""
    runs = table_of_runs({("fedavg", target, 0): 0.5 for target in ("photo", "²", "10", "9.5")})
    assert compare(runs).targets == ["9.5", "10", "photo", "²"]


@pytest.mark.parametrize("baseline", [None, "fedavg"])
def test_budgets_are_compared_over_the_targets_that_both_have(baseline):
    """A run on photo trains on more images than one on sketch, whichever method it is."""
    accuracies = {("fedavg", "photo", 0): 0.9, ("fedavg", "sketch", 0): 0.6, ("csac", "sketch", 0): 0.7}
    runs = table_of_runs(accuracies)
    runs.summary["images"] = runs.summary["target"].map({"photo": 20_000, "sketch": 10_000})
    notes = compare(runs, baseline=baseline).notes
    assert not any(note.startswith("Budgets differ") for note in notes)
    assert any(note.startswith("Budgets and costs of csac are averages over sketch alone") for note in notes)
    runs.summary.loc[runs.summary["method"] == "csac", "images"] = 20_000
    (note,) = (note for note in compare(runs, baseline=baseline).notes if note.startswith("Budgets differ"))
    assert "beside the images of fedavg, csac 2 times;" in note
    assert not any("Budgets and costs" in note for note in compare(two_methods()).notes)


def test_one_seed_each_is_said():
    """The largest number of seeds of a method decides, not how many there are in all."""
    other = compare(table_of_runs({("fedavg", "photo", 0): 0.9, ("csac", "photo", 1): 0.8})).notes
    assert any(note.startswith("One seed each: no standard deviation") for note in other)
    alone = compare(table_of_runs({("fedavg", "photo", 0): 0.9})).notes
    assert any(note.startswith("One seed: no standard deviation") for note in alone)
    assert not any("sample standard deviation" in note for note in [*other, *alone])
    assert any("mean ± sample standard deviation over seeds" in note for note in compare(two_methods()).notes)
