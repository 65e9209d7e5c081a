"""The exact texts of a comparison in every format."""

import csv
import io
import math

import pandas as pd
import pytest
from made_up_runs import one_each, table_of_runs

from fedsim.results import compare, notes
from fedsim.results.cell_texts import MISSING, amount
from fedsim.results.latex import escape_latex
from fedsim.results.tables import escape_markdown


@pytest.fixture
def comparison():
    accuracies = {
        "fedavg": {"photo": (0.9, 0.92), "art_painting": (0.6, 0.7)},
        "csac": {"photo": (0.95, 0.97), "art_painting": (0.7, 0.6)},
    }
    return compare(table_of_runs(accuracies, labels={"csac": "CSAC_50%"}), baseline="fedavg")


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
    comparison.methods.loc[1, "difference"] = -0.025
    assert "& $-$2.5 &" in comparison.render("latex")
    comparison.select, comparison.title = "oracle", "pacs: ORACLE: an upper bound"
    assert r"\multicolumn{13}{l}{pacs: ORACLE: an upper bound; " in comparison.render("latex")  # it is printed


def test_csv_holds_fractions_in_full(comparison):
    csac, fedavg = csv.DictReader(io.StringIO(comparison.render("csv")))
    assert (csac["label"], fedavg["label"], fedavg["difference"]) == ("CSAC_50%", "fedavg", "")
    assert float(fedavg["photo_mean"]) == pytest.approx(0.91, abs=1e-12)
    assert float(csac["difference"]) == pytest.approx(0.025)
    assert (csac["average_seeds"], csac["select"]) == ("2", "best_validation")


def test_terminal_table_is_never_wrapped(comparison):
    lines = comparison.render("table").splitlines()
    assert any(all(cell in line for cell in ("CSAC_50%", "65.0 ± 7.1", "80.5 ± 2.8")) for line in lines)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (134_400_000, "134.4 MB"), (5e12, "5000.0 GB"), (math.nan, MISSING)],
)
def test_amounts(size, text):
    assert amount(size) == text


def test_names_are_shown_as_they_are_written():
    """None of them is markup of LaTeX, Markdown or the terminal."""
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


def test_smaller_test_sets_are_told_seed_by_seed():
    """The number varies with the seed where `data.fraction` and `data.adapt_share` draw images independently."""
    rows = [(label, "art", seed, 40 + seed) for label in ("fedavg", "csac") for seed in (0, 1)]
    table = pd.DataFrame(rows, columns=["label", "target", "seed", "target_images"])
    assert notes.test_size_notes(table) == notes.test_size_notes(table.drop(columns="target_images")) == []
    table.loc[0, "target_images"] = 20
    (note,) = notes.test_size_notes(table)
    assert note.startswith("fedavg is tested on a smaller set: 20 of 40 images of art;")


def test_the_best_of_a_column_is_one_of_equal_seeds():
    """With its first seed alone, FedAvg has 90: better than the 85 of the method that has no other seed."""
    runs = {"fedavg": {"photo": (0.9, 0.2, 0.2)}, "csac": {"photo": [0.85]}}
    text = compare(table_of_runs(runs)).render("markdown")
    assert "| 85.0 |" in text
    assert "**" not in text.partition("\n")[2]
    text = compare(table_of_runs(runs | {"fedprox": {"photo": (0.4, 0.4, 0.4)}})).render("markdown")
    assert "| 85.0 |" in text
    assert "**43.3** ± 40.4" in text
