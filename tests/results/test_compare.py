"""Comparison: numbers worked out by hand, runs that are there in part, and the notes."""

import math

import numpy as np
import pandas as pd
import pytest
from made_up_runs import cell, notes_of, one_each, table_of_runs, two_methods

from fedsim.common.errors import UserError
from fedsim.results import compare
from fedsim.results.statistics import holm, paired


def test_numbers_by_hand():
    """FedAvg's averages per seed are 75, 81, 79.5: mean 78.5, variance (3.5**2 + 2.5**2 + 1) / 2; CSAC's 83.5, 82, 85.

    The six differences 5, 1, 3, 12, 1, 8 are positive: the exact two-sided p is 2 / 2**6 for distinct ranks.
    """
    comparison = compare(two_methods(), baseline="fedavg")
    photo, average = (cell(comparison, "fedavg", name) for name in ("photo", "average"))
    assert (photo["mean"], photo["std"], photo["seeds"]) == (pytest.approx(0.92), pytest.approx(0.02), 3)
    assert (average["mean"], average["std"]) == (pytest.approx(0.785), pytest.approx(math.sqrt(0.000975)))
    assert cell(comparison, "csac", "average")["std"] == pytest.approx(0.015)
    methods = comparison.methods.set_index("label")
    assert methods["rank"].to_dict() == {"csac": 1, "fedavg": 2}
    csac, fedavg = methods.loc["csac"], methods.loc["fedavg"]
    assert (csac["difference"], csac["p_value"]) == (pytest.approx(0.835 - 0.785), pytest.approx(2 / 64))
    assert (csac["pairs"], csac["seconds_per_round"], csac["bytes_down_per_round"]) == (6, 3.0, 3_000_000)
    assert math.isnan(fedavg["difference"])
    uncorrected = compare(two_methods(), baseline="fedavg", correction="none")
    assert "p_holm" not in uncorrected.methods
    assert "No correction for testing several methods" in " ".join(uncorrected.notes)


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
    ours, base = np.random.default_rng(seed).random((2, 3, 3))
    found = paired(grid(ours), grid(base))
    assert found["p_value"] == pytest.approx(exact_signed_rank((ours - base).ravel()))
    assert found["difference"] == pytest.approx((ours - base).mean())
    assert (found["pairs"], found["differing"], found["covers"]) == (9, 9, {0, 1, 2})
    same = paired(grid(ours), grid(ours))
    assert (same["p_value"], same["difference"], same["pairs"], same["differing"]) == (1.0, 0.0, 9, 0)
    none = paired(grid(ours), grid(ours * math.nan))
    assert np.isnan([none["p_value"], none["difference"]]).all()
    assert (none["pairs"], none["covers"]) == (0, frozenset())


def test_few_pairs_are_admitted():
    few = compare(one_each("fedavg", "csac"), baseline="fedavg")
    for words in ("too few cells for any p < .05", "not independent", "One seed: no standard deviation"):
        assert words in " ".join(few.notes)
    assert math.isnan(few.cells["std"].iloc[0])
    notes = compare(two_methods(), baseline="fedavg").notes
    assert "too few" not in " ".join(notes)
    assert "mean ± sample standard deviation over seeds" in notes[0]


def test_an_incomplete_method_leaves_the_others_their_average():
    """fedbn: pairs photo 0 (0), sketch 0 (+20), sketch 1 (-10); csac on photo alone: +5 and +15, and no rank."""
    accuracies = {
        "fedavg": {"photo": (0.9, 0.8), "sketch": (0.6, 0.5)},
        "fedbn": {"photo": (0.9, math.nan), "sketch": (0.8, 0.4)},
        "csac": {"photo": (0.95, 0.95)},
    }
    comparison = compare(table_of_runs(accuracies), baseline="fedavg")
    methods = comparison.methods.set_index("label").loc[["fedavg", "fedbn", "csac"]]
    assert cell(comparison, "fedavg", "average")["mean"] == pytest.approx(0.7)
    assert methods[["seeds", "pairs"]].to_numpy().tolist() == [[2, 4], [1, 3], [0, 2]]
    assert methods["difference"].tolist()[1:] == pytest.approx([0.1 / 3, 0.1])
    assert methods["rank"].fillna(0).tolist() == [2, 1, 0]
    (missing,) = notes_of(comparison, "Missing")
    assert missing.endswith("fedbn: photo (seed 1); csac: sketch (every seed).")
    assert notes_of(comparison, "Without a rank: csac")
    assert "\N{EN DASH}" in (text := comparison.render("markdown"))
    assert "| 1 of 2 |" in text


def test_difference_and_rank_are_paired_where_seeds_are_uneven():
    """FedAvg has a third, easy seed: the difference of the averages is -1.5 points, that of the pairs +2."""
    runs = table_of_runs({"fedavg": {"photo": (0.70, 0.70, 0.805)}, "csac": {"photo": (0.72, 0.72)}})
    with_base = compare(runs, baseline="fedavg")
    methods = with_base.methods.set_index("label")
    csac = methods.loc["csac"]
    assert csac["average"] - methods.loc["fedavg", "average"] == pytest.approx(-0.015)
    assert (csac["difference"], csac["pairs"], csac["rank"]) == (pytest.approx(0.02), 2, 1)
    assert notes_of(with_base, "Seed 2 is only in fedavg")
    assert "| 2 |" in with_base.render("markdown").splitlines()[5]
    alone = compare(runs)
    assert alone.methods.set_index("label")["rank"].to_dict() == {"fedavg": 2, "csac": 1}
    assert notes_of(alone, "Ranks rest on the seeds that all ranked methods have: 0, 1.")


def test_no_complete_or_common_seed_gives_no_average_and_no_rank():
    comparison = compare(table_of_runs({"fedavg": {"photo": [0.9]}, "csac": {"sketch": [0.6]}}), baseline="fedavg")
    assert comparison.methods[["average", "difference"]].isna().all(axis=None)
    for format in ("table", "csv", "markdown", "latex"):
        assert comparison.render(format)
    runs = table_of_runs({"fedavg": {"photo": [0.5]}, "fedbn": {"photo": [0.6]}, "csac": {"photo": {7: 0.9}}})
    comparison = compare(runs)
    assert comparison.methods.set_index("label")["rank"].fillna(0).to_dict() == {"fedavg": 2, "fedbn": 1, "csac": 0}
    assert notes_of(comparison, "Without a rank: csac")
    assert notes_of(comparison, "One seed each: no standard deviation, differences may be noise.")


@pytest.mark.parametrize(("column", "sign"), [("transductive", "†"), ("uses_target_unlabelled", "‡")])
def test_methods_that_see_target_images_are_ranked_apart(column, sign):
    accuracies = {"fedig-a": 0.99, "fedavg": 0.5, "tent": 0.98, "csac": 0.6}
    runs = table_of_runs({method: {"photo": (value, value)} for method, value in accuracies.items()})
    runs.summary["transductive"] = False
    runs.summary[column] = runs.summary["method"].isin(["fedig-a", "tent"])
    for baseline in (None, "fedavg"):
        comparison = compare(runs, baseline=baseline)
        assert list(comparison.methods["label"]) == ["csac", "fedavg", "fedig-a", "tent"]
        assert list(comparison.methods["rank"]) == [1, 2, 1, 2]
        assert any("ranked apart" in note for note in notes_of(comparison, sign))
        lines = comparison.render("markdown").splitlines()
        assert f"fedig-a {sign} | 99.0" in lines[6]  # not bold: the column's best is csac's
        assert f"| 1 {sign} |" in lines[6]
        assert "**60.0**" in lines[4]


def test_budgets_are_columns_and_differences_are_said():
    runs = two_methods()
    assert not notes_of(compare(runs), "Budgets")
    runs.summary["images"] = np.where(runs.summary["method"] == "csac", 20_800, 13_000)
    runs.summary["steps"] = 200
    text = compare(runs).render("markdown")
    for words in ("| Images | Steps |", "| 20,800 | 200 |", "beside the images of fedavg, csac 1.6 times;"):
        assert words in text
    (note,) = notes_of(compare(runs, baseline="csac"), "Budgets differ")
    assert "beside the images of csac, fedavg 0.62 times;" in note


@pytest.mark.parametrize("baseline", [None, "fedavg"])
def test_budgets_are_compared_over_the_targets_that_both_have(baseline):
    """A run on photo trains on more images than one on sketch, whichever method it is."""
    runs = table_of_runs({"fedavg": {"photo": [0.9], "sketch": [0.6]}, "csac": {"sketch": [0.7]}})
    runs.summary["images"] = runs.summary["target"].map({"photo": 20_000, "sketch": 10_000})
    comparison = compare(runs, baseline=baseline)
    assert not notes_of(comparison, "Budgets differ")
    assert notes_of(comparison, "Budgets and costs of csac are averages over sketch alone")
    runs.summary.loc[runs.summary["method"] == "csac", "images"] = 20_000
    (note,) = notes_of(compare(runs, baseline=baseline), "Budgets differ")
    assert "beside the images of fedavg, csac 2 times;" in note


def test_same_splits_are_said():
    runs = two_methods()
    runs.summary["split_seed"] = runs.summary["seed"]
    assert not notes_of(compare(runs), "Same splits")
    for method, said in (("fedavg", "fedavg"), ("csac", "all methods")):
        runs.summary.loc[runs.summary["method"] == method, "split_seed"] = 3
        assert notes_of(compare(runs), f"Same splits for all seeds ({said})")


def test_oracle_is_labelled():
    comparison = compare(two_methods(), select="oracle")
    assert "ORACLE" in comparison.title
    assert "upper bound" in " ".join(comparison.notes)
    assert cell(comparison, "fedavg", "photo")["mean"] == pytest.approx(0.93)


def test_targets_are_in_their_natural_order_and_none_is_called_average():
    """`²`.isdigit() is true, but it is no number. The average over domains would be shown as a domain of that name."""
    names = {target: [0.5] for target in ("photo", "²", "10", "9.5")}
    assert compare(table_of_runs({"fedavg": names})).targets == ["9.5", "10", "photo", "²"]
    with pytest.raises(UserError, match="a domain is called 'average'"):
        compare(table_of_runs({"fedavg": names | {"average": [0.5]}}))
