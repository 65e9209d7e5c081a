"""Comparison: numbers worked out by hand, runs that are there in part, and the notes."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from invented import cell, notes_of, one_each, table_of_runs, two_methods, write_run
from invented import pacs_experiment as full_size

from fedsim.analysis import compare, notes
from fedsim.analysis.compare import run_labels
from fedsim.analysis.comparison import without_exchange
from fedsim.analysis.metrics import frequent_class_shares
from fedsim.analysis.notes import edge_notes, frequent_class_notes, rare_class_notes, verdict_notes
from fedsim.analysis.statistics import holm, paired, shared_targets, worst_means
from fedsim.common.errors import UserError
from fedsim.records import read_runs
from fedsim.records.differences import variant_text
from fedsim.records.predictions import Predictions


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
    assert "mean ± sample standard deviation over seeds" in comparison.notes[1]
    ground = "The pairs are 2 unseen domains with up to 3 seeds each; over the 2 alone no p below .500 is possible."
    assert comparison.notes[0] == f"These differ over these pairs from fedavg: csac (better, p Holm .031). {ground}"
    uncorrected = compare(two_methods(), baseline="fedavg", correction="none")
    assert "p_holm" not in uncorrected.methods
    assert "No correction for testing several methods" in " ".join(uncorrected.notes)
    upper = compare(two_methods(), select="oracle")
    assert ("ORACLE" in upper.title, "upper bound" in " ".join(upper.notes)) == (True, True)
    assert cell(upper, "fedavg", "photo")["mean"] == pytest.approx(0.93)
    few = compare(one_each("fedavg", "csac"), baseline="fedavg")
    for words in ("too few cells for any p < .05", "not independent", "One seed: no standard deviation"):
        assert words in " ".join(few.notes)
    assert few.notes[0].startswith("No method is shown to differ from fedavg: the least p Holm is ")
    assert "differ from" not in compare(two_methods()).notes[0]
    assert "csac (better, p without a correction .031)." in uncorrected.notes[0]
    assert "too few" not in " ".join(comparison.notes)


def test_the_verdict_says_so_where_seeds_repeat_few_domains():
    """Six pairs: of six domains with one seed, p is 2 / 2 ** 6; of one domain, six seeds repeat it: 2 / 2 ** 1."""

    def verdict(targets, seeds):
        pairs = list(itertools.product(targets, range(seeds)))
        rows = [(label, *pair, 0.5) for label in "ab" for pair in pairs]
        table = pd.DataFrame(rows, columns=["label", "target", "seed", "accuracy"])
        methods = pd.DataFrame({"label": ["a", "b"], "difference": [math.nan, 0.04], "p_holm": [math.nan, 0.03125]})
        found = SimpleNamespace(table=table, methods=methods, baseline="a", measure=SimpleNamespace(less_is_better=0))
        return verdict_notes(found)[0]

    assert verdict("uvwxyz", 1) == "Shown to differ from a: b (better, p Holm .031)."
    start = "These differ over these pairs from a: b (better, p Holm .031). The pairs are "
    assert verdict("uvwxy", 2) == (
        f"{start}5 unseen domains with up to 2 seeds each; over the 5 alone no p below .062 is possible."
    )
    assert verdict("u", 6) == f"{start}1 unseen domain with up to 6 seeds; over it alone no p below 1.000 is possible."


def test_selected_rounds_that_are_the_first_or_the_last_are_counted():
    """Of eight runs of 10 rounds two select round 1 or 2, and two round 10: a quarter. Runs of 4 rounds are out."""
    summary = pd.DataFrame({"best_validation_round": [1, 2, 3, 5, 7, 9, 10, 10], "rounds": 10})
    assert edge_notes(summary, "best_validation") == [
        "In 2 of 8 runs the selected round is one of the first two.",
        "In 2 of 8 runs the selected round is the last one: more rounds may change the order.",
    ]
    assert edge_notes(summary.iloc[1:], "best_validation") == [
        "In 2 of 7 runs the selected round is the last one: more rounds may change the order.",
    ]
    assert edge_notes(summary, "last") == []
    assert edge_notes(summary.assign(rounds=4), "best_validation") == []
    assert edge_notes(summary.assign(best_validation_round=math.nan), "best_validation") == []
    notes = compare(two_methods()).notes
    assert any(note.startswith("Each run counts at the round with the best validation of the cl") for note in notes)
    assert "Each run counts at its last round." in compare(two_methods(), select="last").notes


def test_a_row_that_is_not_above_the_most_frequent_class(tmp_path):
    """Four of five examples are dogs: 80 %. FedAvg has 80 and is not above it; FedProx has 90, and then 70."""
    for method in ("fedavg", "fedprox"):
        run = write_run(tmp_path, pacs_experiment(method, "photo", 0, train={"rounds": 1}))
        truth, given = np.array([0, 0, 1, 0, 0]), np.full((5, 2), 0.5, dtype=np.float32)
        Predictions(np.arange(5), truth, given, ("dog", "cat")).write(run, 0)
        Predictions(np.arange(5), truth, given, ("dog", "cat")).write(run, 1)
    runs = read_runs(tmp_path)
    table = compare(runs).table
    shares = frequent_class_shares(runs, table, "last")
    assert shares == {"photo": (5, 0.8)}
    table = table.assign(accuracy=[0.8, 0.9])
    start = "photo: one answer for all of its 5 tested examples is right in 80.0 %; "
    way_out = "Such answers gain nothing by --metric balanced_accuracy and --metric auroc."
    sampling = "± does not say which examples happened to be tested: one of the 5 of photo is 20.0 points."
    assert frequent_class_notes(table, shares) == [f"{start}not above it: fedavg.", way_out, sampling]
    assert frequent_class_notes(table.assign(accuracy=[0.8, 0.7]), shares)[0] == f"{start}no row is above it."
    assert frequent_class_notes(table.assign(accuracy=[0.81, 0.9]), shares) == [sampling]
    assert frequent_class_notes(table.assign(accuracy=[0.81, 0.9]), {"photo": (500, 0.8)}) == []
    assert frequent_class_notes(table, {}) == []
    seeds = pd.DataFrame({"target": "photo", "label": "fedavg", "accuracy": [0.8] * 3})
    assert seeds["accuracy"].groupby(seeds["label"]).mean()["fedavg"] > 0.8  # in its last bit
    assert frequent_class_notes(seeds, shares)[0] == f"{start}no row is above it."
    rare = "switzerland: its AUROC rests on 1 of 46 tested examples; the rest is one class."
    assert rare_class_notes({"switzerland": (46, 45 / 46), "hungary": (260, 0.6)}) == [rare]


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


def test_signed_rank_equals_enumeration():
    ours, base = np.random.default_rng(0).random((2, 3, 3))
    found = paired(grid(ours), grid(base))
    assert found["p_value"] == pytest.approx(exact_signed_rank((ours - base).ravel()))
    assert found["difference"] == pytest.approx((ours - base).mean())
    assert (found["pairs"], found["differing"], found["covers"]) == (9, 9, {0, 1, 2})
    same = paired(grid(ours), grid(ours))
    assert (same["p_value"], same["difference"], same["pairs"], same["differing"]) == (1.0, 0.0, 9, 0)
    none = paired(grid(ours), grid(ours * math.nan))
    assert np.isnan([none["p_value"], none["difference"]]).all()
    assert (none["pairs"], none["covers"]) == (0, frozenset())


def test_the_worst_domain_is_the_least_mean_over_seeds_among_the_domains_of_all_rows():
    """FedAvg: photo 0.8, cartoon 0.6, sketch 0.65, and its least accuracy is 0.5; CSAC: photo 0.75, sketch 0.7.

    CSAC has no run on cartoon, so that FedAvg's 0.6 there does not count. With photo alone in common there is no worst.
    """
    fedavg = {"photo": (0.7, 0.9), "cartoon": (0.6, 0.6), "sketch": (0.5, 0.8)}
    comparison = compare(table_of_runs({"fedavg": fedavg, "csac": {"photo": (0.75,), "sketch": (0.7,)}}))
    worst = comparison.methods.set_index("label")["worst"]
    assert worst.to_dict() == pytest.approx({"fedavg": 0.65, "csac": 0.7})
    (note,) = notes_of(comparison, "Worst")
    assert note == (
        "Worst: the least mean over seeds among 2 of 3 targets, on which every row has a value: photo, sketch."
    )
    alone = compare(table_of_runs({"fedavg": fedavg}))
    assert alone.methods["worst"].tolist() == pytest.approx([0.6])
    assert notes_of(alone, "Worst") == ["Worst: the least mean over seeds among the targets."]
    for others in ({"photo": (0.75,)}, {"photo": (0.75,), "sketch": (math.nan,)}):
        without = compare(table_of_runs({"fedavg": fedavg, "csac": others}))
        assert "worst" not in without.methods
        assert "Worst" not in without.render("table")
        assert "The worst target is left out: it takes two targets on which every row has a value." in without.notes


def test_an_undefined_domain_is_not_the_worst():
    table = pd.DataFrame({"label": "fedavg", "target": ["a", "b", "c"], "mean": [0.9, math.nan, 0.8]})
    assert shared_targets(table, ["a", "b", "c"]) == ["a", "c"]
    assert worst_means(table, ["a", "c"]).to_dict() == {"fedavg": 0.8}
    assert worst_means(table, ["a", "c"], less_is_better=True).to_dict() == {"fedavg": 0.9}


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
    texts = [comparison.render(form) for form in ("markdown", "table", "csv", "latex")]
    assert ("\N{EN DASH}" in texts[0], "| 1 of 2 |" in texts[0], all(texts)) == (True, True, True)


def test_pooled_training_is_apart_without_rank_and_bytes():
    """DeepAll is a reference that nothing federates: it has no place among the others, also where it is the best."""
    accuracies = {"deepall": 0.9, "fedavg": 0.5, "fedprox": 0.6}
    cells = {method: dict.fromkeys(("photo", "sketch"), (each, each)) for method, each in accuracies.items()}
    runs = table_of_runs(cells)
    runs.summary["pooled"] = runs.summary["method"] == "deepall"
    comparison = compare(runs, baseline="fedavg")
    methods = comparison.methods.set_index("label")
    assert list(methods.index) == ["fedprox", "fedavg", "deepall"]
    assert methods["rank"].tolist()[:2] == [1, 2]
    assert methods.loc["deepall", ["rank", "bytes_down_per_round", "bytes_up_per_round"]].isna().all()
    assert methods["bytes_down_per_round"].notna().tolist() == [True, True, False]
    text = comparison.render("markdown")
    row = next(line for line in text.splitlines() if line.startswith("| deepall §"))
    assert "**" not in row
    assert "§ not federated: one client holds all data, and sends nothing; without a rank." in text
    assert "Without a rank: deepall" not in text
    runs.summary["transductive"] = runs.summary["method"] == "deepall"  # as deepall+t3a is
    both = compare(runs, baseline="fedavg")
    assert both.methods.set_index("label")["rank"].isna().tolist() == [False, False, True]
    text = both.render("markdown")
    assert "| deepall §† |" in text
    assert "§ not federated: one client holds all data, and sends nothing; without a rank." in text
    assert "Without a rank: deepall" not in text
    rounds = pd.DataFrame({"label": ["fedavg", "deepall"], "bytes_down": 1.0, "bytes_up": 1.0})
    assert without_exchange(rounds, both.methods)["bytes_up"].isna().tolist() == [False, True]
    del runs.summary["pooled"]  # as records before version 0.2 have it
    without = compare(runs)  # ranked by the averages
    assert without.methods.set_index("label")["rank"].tolist()[:2] == [1, 2]


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


def test_budgets_are_columns_and_differences_and_same_splits_are_said():
    runs = two_methods()
    assert not notes_of(compare(runs), "Budgets")
    runs.summary["images"] = np.where(runs.summary["method"] == "csac", 20_800, 13_000)
    runs.summary["steps"] = 200
    text = compare(runs).render("markdown")
    for words in ("| Images | Steps |", "| 20,800 | 200 |", "beside the images of fedavg, csac 1.6 times;"):
        assert words in text
    (note,) = notes_of(compare(runs, baseline="csac"), "Budgets differ")
    assert "beside the images of csac, fedavg 0.62 times;" in note
    of_rows = replace(compare(runs), unit="rows")
    assert "| Rows | Steps |" in of_rows.render("markdown")
    assert "beside the rows of fedavg, csac 1.6 times;" in " ".join(notes.comparison_notes(of_rows, [], []))
    # A run on photo trains on more images than one on sketch, whichever method it is.
    runs = table_of_runs({"fedavg": {"photo": [0.9], "sketch": [0.6]}, "csac": {"sketch": [0.7]}})
    runs.summary["images"] = runs.summary["target"].map({"photo": 20_000, "sketch": 10_000})
    comparison = compare(runs, baseline="fedavg")
    assert not notes_of(comparison, "Budgets differ")
    assert notes_of(comparison, "Budgets and costs of csac are averages over sketch alone")
    runs.summary.loc[runs.summary["method"] == "fedavg", "images"] *= 2
    assert "csac 0.5 times;" in notes_of(compare(runs, baseline="fedavg"), "Budgets differ")[0]
    runs = two_methods()  # on splits of their own, or on the same ones
    runs.summary["split_seed"] = runs.summary["seed"]
    assert not notes_of(compare(runs), "Same splits")
    for method, said in (("fedavg", "fedavg"), ("csac", "all methods")):
        runs.summary.loc[runs.summary["method"] == method, "split_seed"] = 3
        assert notes_of(compare(runs), f"Same splits for all seeds ({said})")


def test_targets_are_in_their_natural_order_and_none_is_called_average():
    """`²`.isdigit() is true, but it is no number. The average over domains would be shown as a domain of that name."""
    names = {target: [0.5] for target in ("photo", "²", "10", "9.5")}
    assert compare(table_of_runs({"fedavg": names})).targets == ["9.5", "10", "photo", "²"]
    with pytest.raises(UserError, match="a domain is called 'average'"):
        compare(table_of_runs({"fedavg": names | {"average": [0.5]}}))


def pacs_experiment(*run, data=None, **sections):
    """Settings with images of a size that no paper has."""
    return full_size(*run, data={"image_size": 64} | (data or {}), **sections)


def labels(runs, *by):
    return list(compare(runs, by=by).methods["label"])


def test_which_settings_tell_runs_apart():
    runs = one_each(pacs_experiment(), pacs_experiment("csac", train={"lr": 0.1, "epochs": 5}))
    with pytest.raises(UserError, match=r"train\.epochs \(1 \| 5\), train\.lr \(0\.01 \| 0\.1\)"):
        compare(runs)
    with pytest.raises(UserError, match=r"train\.epochs"):
        compare(runs, by=["train.lr"])
    comparison = compare(runs, by=["train.lr", "train.epochs"])
    assert list(comparison.methods["label"]) == ["csac (lr=0.1, epochs=5)", "fedavg (lr=0.01, epochs=1)"]
    assert list(comparison.methods["train.lr"]) == ["0.1", "0.01"]
    where = {"run": {"runtime": "ray", "threads": 2, "device": "cpu"}, "data": {"root": "elsewhere", "cache": "there"}}
    weight = {"method": {"name": "gperxan", "guiding_head": {"weight": 0.25}}}  # stands in its label
    for change in (where | {"name": "other"}, weight):
        assert len(labels(one_each(pacs_experiment(), pacs_experiment("csac", **change)))) == 2


def test_a_setting_that_a_label_has_is_not_named_twice():
    """The label of a run has the changes of its recipe; a key with the same end and another value is another one."""
    runs = one_each(
        pacs_experiment("fedprox"),
        pacs_experiment("fedprox", method={"name": "fedprox", "proximal": {"mu": 0.5}}),
        labels={"1": "fedprox@proximal.mu=0.5"},
    )
    assert labels(runs, "method.proximal.mu") == ["fedprox@proximal.mu=0.5", "fedprox (mu=default)"]
    assert variant_text(["train.lr", "train.epochs"], ["0.1", "5"], "mine@lr=0.1,train.epochs=50") == "epochs=5"
    assert variant_text(["train.lr"], ["0.1"], "mine@clr=0.1") == "lr=0.1"
    assert variant_text(["a.x.mu", "a.y.mu"], ["1", "1"], "mine@x.mu=1") == "a.y.mu=1"


@pytest.mark.parametrize(("words", "said"), [
    ({"by": ["train.rl"]}, r"did you mean 'train\.lr'"), ({"baseline": "fedprox"}, "there are: fedavg, csac"),
    ({"select": "lats"}, "did you mean 'last'"),
    ({"baseline": "fedavg", "correction": "bonferroni"}, "known: holm, none"),
    ({"by": ["run.seed"]}, "no run has the setting 'run.seed'"),
])  # fmt: skip
def test_what_cannot_be_compared_is_said(words, said):
    with pytest.raises(UserError, match=said):
        compare(two_methods(), **words)
    with pytest.raises(UserError, match="known: table, csv, markdown, latex"):
        compare(two_methods()).render("html")


def test_runs_with_another_answer_to_failures_are_compared_and_failures_are_said(tmp_path):
    """It may change between the calls of a run; what matters is whether a client has failed."""
    for seed, answer in enumerate(("stop", "continue")):
        folder = write_run(tmp_path, pacs_experiment("fedavg", "photo", seed, run={"on_client_failure": answer}))
    assert "failed" not in " ".join(compare(read_runs(tmp_path)).notes)
    rounds = pd.read_csv(folder / "rounds.csv")
    rounds.loc[rounds["round"].isin([2, 5]), "failed"] = 1
    rounds.to_csv(folder / "rounds.csv", index=False)
    (note,) = [note for note in compare(read_runs(tmp_path)).notes if "failed" in note]
    assert "pacs/fedavg/photo/seed1 (2 rounds)" in note


def test_runs_are_told_apart_by_labels_and_by_any_setting_of_the_run():
    """A sweep's grid may be over a setting of [run] on which numbers seldom depend."""
    shared = one_each("fedavg", "csac", labels={"fedavg": "X", "csac": "X"})
    assert labels(shared) == sorted(run_labels(shared).values()) == ["X [csac]", "X [fedavg]"]  # in tables and figures
    runs = one_each(*(pacs_experiment(run={"update_limit": limit}) for limit in (0, 100)))
    with pytest.raises(UserError, match=r"differ in more than .*: run\.update_limit"):
        compare(runs)
    assert set(labels(runs, "run.update_limit")) == {"fedavg (update_limit=0.0)", "fedavg (update_limit=100.0)"}


def compared_shares(*shares):
    """A run for each (method, share of the target's images that are not tested)."""
    own = [pacs_experiment(method, "photo", seed, data={"adapt_share": s}) for seed, (method, s) in enumerate(shares)]
    return table_of_runs({f"{seed}": {"photo": {seed: 0.5}} for seed in (0, 1)}, {f"{i}": e for i, e in enumerate(own)})


def test_one_method_is_not_tested_on_different_shares_of_the_target():
    """Two methods may differ: one that adapts is tested on what it does not train on, and a note says so."""
    with pytest.raises(UserError, match=r"data\.adapt_share \(0\.0 \| 0\.9\); say .* --by data\.adapt_share"):
        compare(compared_shares(("fedavg", 0.0), ("fedavg", 0.9)))
    apart = labels(compared_shares(("fedavg", 0.2), ("fedavg", 0.5)), "data.adapt_share")
    assert set(apart) == {"fedavg (adapt_share=0.2)", "fedavg (adapt_share=0.5)"}
    assert set(labels(compared_shares(("fada", 0.5), ("fedavg", 0.0)))) == {"fada", "fedavg"}


def test_the_title_says_what_selected_the_round():
    own = {"validation_domain": "sketch"}
    runs = one_each(pacs_experiment("fedavg", run=own), pacs_experiment("csac", run=own))
    comparison, title = compare(runs), "best validation on sketch, which no client has"
    assert (comparison.title, comparison.rule) == (f"pacs: {title}", title)
    assert notes_of(comparison, "The round was selected on sketch")
    assert compare(runs, "last").rule == "last round"
    runs = one_each(pacs_experiment(), pacs_experiment("csac", run={"select_on": "local"}))
    with pytest.raises(UserError, match=r"run\.select_on"):
        compare(runs)
    assert compare(runs, by=["run.select_on"]).title == "pacs: best validation"
