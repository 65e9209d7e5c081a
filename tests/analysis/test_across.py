"""Several data sets in one table, the tests of all pairs, and numbers that a user adds."""

import csv
import io
import itertools
import math
from dataclasses import replace

import pandas as pd
import pytest
from invented import PACS, one_each, pacs_experiment, table_of_runs

from fedsim.analysis import Comparison, compare, notes
from fedsim.analysis.across import across, notes_on, pairs, refuse_one_data_set
from fedsim.analysis.compare import numbers
from fedsim.analysis.comparison import amount
from fedsim.analysis.comparison_figures import critical_figure
from fedsim.analysis.notes import rank_notes
from fedsim.analysis.published import added_rows
from fedsim.common.errors import UserError
from fedsim.common.tables import escape_latex, escape_markdown
from fedsim.records import Runs


def part(scores, metric="accuracy"):
    """A comparison with {(method, target, seed): accuracy}."""
    rows = [dict(zip(("label", "method", "target", "seed"), (key[0], *key)), accuracy=a) for key, a in scores.items()]
    costs = ("images", "steps", "bytes_down_per_round", "bytes_up_per_round", "seconds_per_round")
    flags = ("pooled", "transductive", "uses_target_unlabelled")
    table = pd.DataFrame(rows).assign(**dict.fromkeys(costs, 1.0), **dict.fromkeys(flags, False))
    targets = list(dict.fromkeys(table["target"]))
    cells, methods, _, seeds = numbers(table, targets, (), "", "holm", metric)
    own = Comparison("t", "last", targets, cells, methods, pd.DataFrame(), "", seeds, metric=metric, table=table)
    own.notes = ["said", *rank_notes(own)]
    return own


def test_a_column_is_the_mean_over_a_data_sets_domains_and_the_average_is_taken_per_seed():
    one = {("m", "x", 0): 0.8, ("m", "y", 0): 0.6, ("m", "x", 1): 0.9, ("m", "y", 1): 0.7}
    two = {("m", "z", 0): 0.5, ("m", "z", 1): 0.7}
    lower = {("n", *key[1:]): value - 0.1 for key, value in one.items()}, {("n", "z", 0): 0.4}
    found = across({"A": part(one | lower[0]), "B": part(two | lower[1])}, baseline="n")
    cells = found.cells.set_index(["label", "target"])["mean"]
    # A: (0.7 + 0.8) / 2; B: 0.6; average: seed 0 has (0.7 + 0.5) / 2, seed 1 (0.8 + 0.7) / 2
    assert cells["m"].to_dict() == pytest.approx({"A": 0.75, "B": 0.6, "average": 0.675})
    best = found.methods.set_index("label").loc["m"]
    assert (best["rank"], best["pairs"]) == (1, 3)
    assert best["difference"] == pytest.approx(0.1)
    # What is said of the ranks is said of this table, and not of those of the single data sets.
    assert found.notes[0].startswith("No method is shown to differ from n: the least p Holm is ")
    assert found.notes[1] == "said"
    assert "with n: the cells (data set, seed) that both have" in found.notes[2]
    assert [note[:46] for note in found.notes[3:]] == ["Fewer than 6 differing pairs for every method:"]
    unpaired = across({"A": part(one | lower[0]), "B": part(two | lower[1])}).notes
    assert unpaired == ["said", "Ranks rest on the seeds that all ranked methods have: 0."]
    with pytest.raises(UserError, match="B is measured by dice"):
        across({"A": part(one), "B": part(two, "dice")})


def test_the_title_has_the_rule_of_every_data_set_and_budgets_their_unit():
    """The clients that lie in one of the data sets are said, too."""
    one, two = (replace(part({("m", "x", 0): 0.8}), rule="last round") for _ in range(2))
    assert across({"A": one, "B": two}).title == "2 data sets: last round"
    two = replace(two, rule="last round, photo lies", unit="rows")
    found = across({"A": one, "B": two})
    assert found.title == "2 data sets: A: last round; B: last round, photo lies"
    assert (found.unit, across({"B": two, "C": two}).unit) == ("examples", "rows")


def scores(blocks):
    """m is better than n, and n than k, on every domain; k lacks none, `late` has only the first."""
    levels = {"m": 0.9, "n": 0.8, "k": 0.5}
    found = {
        (m, f"d{b}", s): level - 0.01 * b * level for m, level in levels.items() for b in range(blocks) for s in (0, 1)
    }
    return found | {("late", "d0", 0): 0.1}


@pytest.mark.parametrize(
    ("blocks", "p_value", "count", "groups"),
    # All signs are equal: p = 2 / 2^blocks, and Holm's smallest of three is three times as large.
    [(6, 1 / 32, 0, [["m", "n", "k"]]), (8, 1 / 128, 3, [])],
)
def test_all_pairs(blocks, p_value, count, groups):
    found = pairs({"A": part(scores(blocks))})
    assert found.ranks.to_dict() == {"m": 1, "n": 2, "k": 3}
    assert found.blocks == blocks
    assert found.tests["p_value"].tolist() == pytest.approx([p_value] * 3)
    assert found.tests["p_holm"].tolist() == pytest.approx([3 * p_value] * 3)
    assert found.groups == groups
    assert found.left_out == ["late"]
    words = " ".join(notes_on(found))
    assert f"{count} of 3 pairs differ" in words
    assert ("no pair can differ" in words) == (not count)
    assert len(critical_figure(found, "A").axes[0].texts) == 3


def test_methods_of_another_group_and_domains_without_a_value_are_in_no_test():
    """On d7 the metric has no value in any run; n is pooled training, which has no rank in the table either."""
    cells = scores(8)
    for method, target, seed in cells:
        if target == "d7":
            cells[method, target, seed] = math.nan
    own = replace(part(cells), undefined=("d7",))
    own.methods.loc[own.methods["label"] == "n", "group"] = "pooled"
    found = pairs({"A": own})
    assert found.ranks.to_dict() == {"m": 1, "k": 2}
    assert (found.blocks, found.left_out, found.apart) == (7, ["late"], ["n"])
    assert "Ranked separately, and in no test: n." in notes_on(found)
    own.methods["group"] = "transductive"  # all of one group are tested, whichever it is
    assert pairs({"A": own}).ranks.to_dict() == {"m": 1, "n": 2, "k": 3}


def test_seeds_of_one_domain_are_one_block_and_only_shared_seeds_count():
    found = pairs({"A": part({("m", "x", 0): 0.5, ("m", "x", 1): 0.1, ("n", "x", 0): 0.4})})
    assert found.tests["difference"].tolist() == pytest.approx([0.1])
    assert found.blocks == 1
    with pytest.raises(UserError, match="no two methods"):
        pairs({"A": part({("m", "x", 0): 0.5, ("n", "y", 0): 0.4})})
    with pytest.raises(UserError, match="m, n have no seed in common on x of A; leave some out with --methods"):
        pairs({"A": part({("m", "x", 0): 0.5, ("n", "x", 7): 0.4})})
    # Of an error the better method has less.
    found = pairs({"A": part({("m", "x", 0): 0.2, ("n", "x", 0): 0.05}, "ece")})
    assert found.ranks.to_dict() == {"n": 1, "m": 2}
    assert found.tests[["first", "difference"]].values.tolist() == [["n", pytest.approx(-0.15)]]


def test_methods_with_the_same_seeds_in_another_order_share_a_rank():
    """The sums of .1, .2, .3 and of .3, .2, .1 differ in their last bit: both are 1.5, and k is always the third."""
    values = {"m": (0.1, 0.2, 0.3), "n": (0.3, 0.2, 0.1), "k": (0.05, 0.05, 0.05)}
    cells = {}
    for (method, of_seeds), block in itertools.product(values.items(), ("x", "y")):
        for seed, value in enumerate(of_seeds):
            cells[method, block, seed] = value
    found = pairs({"A": part(cells)})
    assert found.ranks.to_dict() == {"m": 1.5, "n": 1.5, "k": 3}
    # Friedman with ties: of two blocks with the ranks 1.5, 1.5 and 3 the statistic is 4, with two degrees of freedom.
    assert found.friedman == pytest.approx(math.exp(-2))


def test_one_data_set_is_not_two():
    nothing = [pd.DataFrame()] * 4
    photos, again, others = (
        Runs(*nothing, {"r": pacs_experiment(name=name, data={"dataset": data})})
        for name, data in (("a", "pacs"), ("b", "pacs"), ("c", "vlcs"))
    )
    refuse_one_data_set({"a": photos, "c": others})
    with pytest.raises(UserError, match="a and b have runs on the same data set, pacs"):
        refuse_one_data_set({"a": photos, "b": again})


ROW = "Mine Table 1,PACS,ResNet-18,FedAvg,photo,95.5,\n"
HEAD = "paper,dataset,backbone,method,target_domain,accuracy_percent,std_percent\n"


def test_numbers_that_a_user_adds(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(HEAD + ROW + ROW.replace("PACS", "VLCS").replace("95.5", "1"))
    rows, notes = added_rows(file, pacs_experiment(), ["fedavg"], PACS)
    assert rows[["method", "source", "target", "mean"]].values.tolist() == [["fedavg", "Mine Table 1", "photo", 0.955]]
    assert "without a check" in notes[0]
    file.write_text(HEAD + ROW + ROW.replace("photo", "average"))  # of which domains it is, the file does not say
    rows, notes = added_rows(file, pacs_experiment(), ["fedavg"], PACS)
    assert list(rows["target"]) == ["photo"]
    assert "are not shown: they are over other domains" in notes[1]
    file.write_text(HEAD + "".join(ROW.replace("photo", target) for target in (*PACS, "average")))
    rows, notes = added_rows(file, pacs_experiment(), ["fedavg"], PACS)
    assert (set(rows["target"]), len(notes)) == ({*PACS, "average"}, 1)
    assert "average" not in set(added_rows(file, pacs_experiment(), ["fedavg"], PACS[:2])[0]["target"])
    for text, words in ((HEAD + ROW.replace("95.5", "955"), "line 2: accuracy_percent"), ("paper\nx\n", "no column")):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            added_rows(file, pacs_experiment(), ["fedavg"], PACS)


@pytest.fixture
def comparison():
    accuracies = {
        "fedavg": {"photo": (0.9, 0.92), "art_painting": (0.6, 0.7)},
        "csac": {"photo": (0.95, 0.97), "art_painting": (0.7, 0.6)},
    }
    return compare(table_of_runs(accuracies, labels={"csac": "CSAC_50%"}), baseline="fedavg")


def test_markdown_and_csv(comparison):
    lines = comparison.render("markdown").splitlines()
    assert lines[:6] == [
        "**pacs: best source validation**",
        "",
        "| Method | art_painting | photo | Average | Worst | Seeds | Rank | Δ fedavg | p | p Holm | Pairs | Down/round "
        "| Up/round | s/round |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| CSAC_50% | **65.0** ± 7.1 | **96.0** ± 1.4 | **80.5** ± 2.8 | 65.0 | 2 | 1 | +2.5 | .750 | .750 "
        "| 4 | 3.0 MB | 1.5 kB | 2.5 |",
        "| fedavg | **65.0** ± 7.1 | 91.0 ± 1.4 | 78.0 ± 4.2 | 65.0 | 2 | 2 | \N{EN DASH} | \N{EN DASH} "
        "| \N{EN DASH} | \N{EN DASH} | 3.0 MB | 1.5 kB | 2.5 |",
    ]
    csac, fedavg = csv.DictReader(io.StringIO(comparison.render("csv")))
    assert (csac["label"], fedavg["label"], fedavg["difference"]) == ("CSAC_50%", "fedavg", "")
    assert float(fedavg["photo_mean"]) == pytest.approx(0.91, abs=1e-12)
    assert float(csac["difference"]) == pytest.approx(0.025)
    assert (csac["average_seeds"], csac["select"]) == ("2", "best_validation")
    assert float(csac["worst"]) == pytest.approx(0.65)
    amounts = {0: "0 B", 999: "999 B", 1500: "1.5 kB", 134_400_000: "134.4 MB", 5e12: "5000.0 GB"}
    assert [amount(size) for size in amounts] == list(amounts.values())


def test_latex(comparison):
    lines = comparison.render("latex").splitlines()
    assert lines[:10] == [
        r"% needs \usepackage{booktabs}",
        "% pacs: best source validation; accuracy on the unseen domain (%)",
        r"\begin{tabular}{lrrrrrrrrrrrrr}",
        r"\toprule",
        r"Method & art\_painting & photo & Average & Worst & Seeds & Rank & $\Delta$ fedavg & p & p Holm & Pairs "
        r"& Down/round & Up/round & s/round \\",
        r"\midrule",
        r"CSAC\_50\% & \textbf{65.0} $\pm$ 7.1 & \textbf{96.0} $\pm$ 1.4 & \textbf{80.5} $\pm$ 2.8 & 65.0 & 2 & 1 "
        r"& +2.5 & .750 & .750 & 4 & 3.0 MB & 1.5 kB & 2.5 \\",
        r"fedavg & \textbf{65.0} $\pm$ 7.1 & \underline{91.0} $\pm$ 1.4 & \underline{78.0} $\pm$ 4.2 & 65.0 & 2 & 2 "
        r"& -- & -- & -- & -- & 3.0 MB & 1.5 kB & 2.5 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert all(line.startswith("% ") for line in lines[10:])
    comparison.methods.loc[1, "difference"] = -0.025
    assert "& $-$2.5 &" in comparison.render("latex")
    comparison.select, comparison.title = "oracle", "pacs: ORACLE: an upper bound"
    assert r"\multicolumn{14}{l}{pacs: ORACLE: an upper bound; " in comparison.render("latex")  # it is printed


def test_names_are_shown_as_they_are_written():
    assert escape_latex(r"a_b & 5% #1 {x} ~ ^ \y <z>") == (
        r"a\_b \& 5\% \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{}y $<$z$>$"
    )
    label = r"a*b*|<i>_x_`y`[z](u) $c$ d_e &amp; ~f~ \\"
    text = compare(one_each("fedavg", labels={"fedavg": label})).render("markdown")
    assert r"| a\*b\*\|\<i\>\_x\_\`y\`\[z\](u) \$c\$ d_e \&amp; \~f\~ \\\\ | **50.0**" in text
    escaped = {"art_painting two\nlines": "art_painting two lines", "- x": r"\- x", "-2.5": "-2.5"}
    assert {name: escape_markdown(name) for name in escaped} == escaped
    runs = table_of_runs(
        {method: {"[red]photo[/x]": [0.5]} for method in ("fedavg", "csac")},
        labels={"fedavg": "a[/b]", "csac": "[red]c"},
    )
    runs.summary["experiment"] = "e[/y]"
    shown = compare(runs, baseline="a[/b]").render("table")
    for name in ("[red]photo[/x]", "a[/b]", "[red]c", "e[/y]: best", "Δ a[/b]"):
        assert name in shown


def test_the_best_of_a_column_and_smaller_test_sets():
    """With its first seed alone, FedAvg has 90: better than the 85 of the method that has no other seed. The number
    varies with the seed where `data.fraction` and `data.adapt_share` draw images independently."""
    runs = {"fedavg": {"photo": (0.9, 0.2, 0.2)}, "csac": {"photo": [0.85]}}
    text = compare(table_of_runs(runs)).render("markdown")
    assert "| 85.0 |" in text
    assert "**" not in text.partition("\n")[2]
    text = compare(table_of_runs(runs | {"fedprox": {"photo": (0.4, 0.4, 0.4)}})).render("markdown")
    assert "| 85.0 |" in text
    assert "**43.3** ± 40.4" in text
    rows = [(label, "art", seed, 40 + seed) for label in ("fedavg", "csac") for seed in (0, 1)]
    table = pd.DataFrame(rows, columns=["label", "target", "seed", "target_images"])
    assert notes.test_size_notes(table, "images") == []
    table.loc[0, "target_images"] = 20
    (note,) = notes.test_size_notes(table, "images")
    assert note.startswith("fedavg is tested on a smaller set: 20 of 40 images of art;")
