"""The exact texts of a comparison in every format."""

import csv
import io

import pandas as pd
import pytest
from invented import pacs_experiment
from made_up_runs import table_of_runs

from fedsim.results import compare, notes
from fedsim.results.cell_texts import amount
from fedsim.results.latex import escape_latex
from fedsim.results.tables import escape_markdown


@pytest.fixture
def comparison():
    accuracies = {
        ("fedavg", "photo", 0): 0.9,
        ("fedavg", "photo", 1): 0.92,
        ("fedavg", "art_painting", 0): 0.6,
        ("fedavg", "art_painting", 1): 0.7,
        ("csac", "photo", 0): 0.95,
        ("csac", "photo", 1): 0.97,
        ("csac", "art_painting", 0): 0.7,
        ("csac", "art_painting", 1): 0.6,
    }
    small = {key: pacs_experiment(*key, data={"image_size": 64}) for key in accuracies}
    return compare(table_of_runs(accuracies, small, {"csac": "CSAC_50%"}), baseline="fedavg")


def test_markdown(comparison):
    lines = comparison.render("markdown").splitlines()
    assert lines[:6] == [
        "**pacs: best source validation**",
        "",
        "| Method | art_painting | photo | Average | Seeds | Rank | Δ fedavg | p | p Holm | Pairs | Down/round "
        "| Up/round | s/round |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| CSAC_50% | **65.0** ± 7.1 | **96.0** ± 1.4 | **80.5** ± 2.8 | 2 | 1 | +2.5 | .750 | .750 "
        "| 4 | 3.0 MB | 1.5 kB | 2.5 |",
        "| fedavg | **65.0** ± 7.1 | 91.0 ± 1.4 | 78.0 ± 4.2 | 2 | 2 | \N{EN DASH} | \N{EN DASH} "
        "| \N{EN DASH} | \N{EN DASH} | 3.0 MB | 1.5 kB | 2.5 |",
    ]


def test_latex(comparison):
    lines = comparison.render("latex").splitlines()
    assert lines[:10] == [
        r"% needs \usepackage{booktabs}",
        "% pacs: best source validation; accuracy on the unseen domain (%)",
        r"\begin{tabular}{lrrrrrrrrrrrr}",
        r"\toprule",
        r"Method & art\_painting & photo & Average & Seeds & Rank & $\Delta$ fedavg & p & p Holm & Pairs & Down/round "
        r"& Up/round & s/round \\",
        r"\midrule",
        r"CSAC\_50\% & \textbf{65.0} $\pm$ 7.1 & \textbf{96.0} $\pm$ 1.4 & \textbf{80.5} $\pm$ 2.8 & 2 & 1 & +2.5 "
        r"& .750 & .750 & 4 & 3.0 MB & 1.5 kB & 2.5 \\",
        r"fedavg & \textbf{65.0} $\pm$ 7.1 & \underline{91.0} $\pm$ 1.4 & \underline{78.0} $\pm$ 4.2 & 2 & 2 & -- & -- "
        r"& -- & -- & 3.0 MB & 1.5 kB & 2.5 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert all(line.startswith("% ") for line in lines[10:])


def test_latex_shows_an_oracle_in_the_table(comparison):
    """A comment does not appear in the printed page."""
    shown = r"\multicolumn{13}{l}{pacs: ORACLE: best round on the target, an upper bound; "
    assert shown not in comparison.render("latex")
    comparison.select = "oracle"
    comparison.title = "pacs: ORACLE: best round on the target, an upper bound"
    assert shown in comparison.render("latex")


def test_csv_holds_fractions_in_full(comparison):
    rows = list(csv.DictReader(io.StringIO(comparison.render("csv"))))
    assert [row["label"] for row in rows] == ["CSAC_50%", "fedavg"]
    assert float(rows[1]["photo_mean"]) == pytest.approx(0.91, abs=1e-12)
    assert float(rows[0]["difference"]) == pytest.approx(0.025)
    assert rows[1]["difference"] == ""
    assert rows[0]["average_seeds"] == "2"
    assert rows[0]["select"] == "best_validation"


def test_latex_sets_a_minus(comparison):
    comparison.methods.loc[1, "difference"] = -0.025
    assert "& $-$2.5 &" in comparison.render("latex")


def test_terminal_table_is_never_wrapped(comparison):
    lines = comparison.render("table").splitlines()
    assert any("CSAC_50%" in line and "65.0 ± 7.1" in line and "80.5 ± 2.8" in line for line in lines)
    assert any("Δ fedavg" in line for line in lines)


def test_labels_with_brackets_are_not_markup():
    runs = table_of_runs({("fedavg", "photo", 0): 0.5}, labels={"fedavg": "CCST[bold]x"})
    assert "CCST[bold]x" in compare(runs).render("table")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (134_400_000, "134.4 MB"),
        (5e12, "5000.0 GB"),
        (float("nan"), "\N{EN DASH}"),
    ],
)
def test_amounts(size, text):
    assert amount(size) == text


def test_latex_escapes():
    assert escape_latex(r"a_b & 5% #1 {x} ~ ^ \y <z>") == (
        r"a\_b \& 5\% \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{}y $<$z$>$"
    )


def test_markdown_shows_names_as_they_are_written():
    label = r"a*b*|<i>_x_`y`[z](u) $c$ d_e &amp; ~f~ \\"
    text = compare(table_of_runs({("fedavg", "photo", 0): 0.5}, labels={"fedavg": label})).render("markdown")
    assert r"| a\*b\*\|\<i\>\_x\_\`y\`\[z\](u) \$c\$ d_e \&amp; \~f\~ \\\\ | **50.0**" in text
    assert escape_markdown("art_painting two\nlines") == "art_painting two lines"
    assert escape_markdown("- x") == r"\- x"
    assert escape_markdown("-2.5") == "-2.5"


def test_terminal_prints_brackets_literally():
    accuracies = {("fedavg", "[red]photo[/x]", 0): 0.5, ("csac", "[red]photo[/x]", 0): 0.6}
    runs = table_of_runs(accuracies, labels={"fedavg": "a[/b]", "csac": "[red]c"})
    runs.summary["experiment"] = "e[/y]"
    text = compare(runs, baseline="a[/b]").render("table")
    for name in ("[red]photo[/x]", "a[/b]", "[red]c", "e[/y]: best", "Δ a[/b]"):
        assert name in text


def test_smaller_test_sets_are_told():
    """A note names a method that is tested on fewer images; without such a method there is no note."""
    rows = [("fedavg", "art", 100), ("fada", "art", 50), ("fedavg", "photo", 80), ("fada", "photo", 80)]
    table = pd.DataFrame(rows, columns=["label", "target", "target_images"]).assign(seed=0)
    (note,) = notes.test_size_notes(table)
    assert note.startswith("fada is tested on a smaller set: 50 of 100 images of art;")
    assert notes.test_size_notes(table[table["target"] == "photo"]) == []
    assert notes.test_size_notes(table.drop(columns="target_images")) == []


def test_the_best_of_a_column_is_one_of_equal_seeds():
    """With its first seed alone, FedAvg has 90: better than the 85 of the method that has no other seed."""
    seeds = {("fedavg", "photo", seed): accuracy for seed, accuracy in enumerate((0.9, 0.2, 0.2))}
    text = compare(table_of_runs(seeds | {("csac", "photo", 0): 0.85})).render("markdown")
    assert "| 85.0 |" in text
    assert "**" not in text.partition("\n")[2]
    others = {("fedprox", "photo", seed): 0.4 for seed in range(3)}
    text = compare(table_of_runs(seeds | others | {("csac", "photo", 0): 0.85})).render("markdown")
    assert "| 85.0 |" in text
    assert "| 43.3 ± 40.4 |" not in text
    assert "**43.3** ± 40.4" in text


def test_a_number_of_images_that_the_seed_draws_is_compared_per_seed():
    """It varies with the seed where `data.fraction` and `data.adapt_share` draw images independently."""
    rows = [(label, "art", seed, 40 + seed) for label in ("fedavg", "csac") for seed in (0, 1)]
    table = pd.DataFrame(rows, columns=["label", "target", "seed", "target_images"])
    assert notes.test_size_notes(table) == []
    table.loc[0, "target_images"] = 20
    (note,) = notes.test_size_notes(table)
    assert note.startswith("fedavg is tested on a smaller set: 20 of 40 images of art;")
