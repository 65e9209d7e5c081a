"""One table in all its forms, compared with texts that were written by hand."""

import csv

import pytest
from jinja2 import UndefinedError

from fedsim.common.tables import LABEL, MISSING, Cell, Column, Row, Table, show_tables, tables_text
from fedsim.common.templates import fill

EVIL = "\x1b[2J\u202e"


@pytest.fixture
def table():
    """Two methods, the numbers of a paper, and a row of details, with texts that every form has to escape."""
    return Table(
        [LABEL, Column("pho_to & <b>"), Column("Δ [x]")],
        [
            Row(["fed_avg*", Cell("87.5", "1.2", place=1, value=87.5), Cell("-0.1", value=-0.1)]),
            Row([f"ga{EVIL}", Cell("86.0", place=2, value=86.0, link="#run=1"), Cell(MISSING, value=float("nan"))]),
            Row(["Paper", Cell("90.0"), ""], "published", is_apart=True),
            Row(["difference", Cell("-2.5"), ""], "detail"),
        ],
        title="pacs",
        subtitle="accuracy (%)",
        notes=["A note with 50 %.", "*Two*"],
        records=[{"label": "a", "x": 0.5}, {"label": "b", "x": float("nan"), "y": 3}],
    )


def test_markdown(table):
    assert table.markdown().splitlines() == [
        "**pacs**",
        "",
        r"| Method | pho_to \& \<b\> | Δ \[x\] |",
        "|---|---:|---:|",
        r"| fed_avg\* | **87.5** ± 1.2 | -0.1 |",
        rf"| ga\[2J | 86.0 | {MISSING} |",
        "| _Paper_ | 90.0 |  |",
        "| _difference_ | -2.5 |  |",
        "",
        "- A note with 50 %.",
        r"- \*Two\*",
    ]


def test_latex(table):
    lines = table.latex().splitlines()
    assert lines == [
        "% pacs; accuracy (%)",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"Method & pho\_to \& $<$b$>$ & $\Delta$ [x] \\",
        r"\midrule",
        r"fed\_avg* & \textbf{87.5} $\pm$ 1.2 & $-$0.1 \\",
        r"ga[2J & \underline{86.0} & -- \\",
        r"\midrule",
        r"Paper & 90.0 &  \\",
        r"\quad difference & $-$2.5 &  \\",
        r"\bottomrule",
        r"\end{tabular}",
        "% A note with 50 %.",
        "% *Two*",
    ]
    assert table.latex(has_lines=False).count("midrule") == 1
    assert r"\multicolumn{3}{l}{pacs; accuracy (\%)} \\" in table.latex(shows_title=True)


def test_html(table):
    text = table.html("text")
    for part in (
        '<table class="sortable text">', '<th scope="col">pho_to &amp; &lt;b&gt;</th>', "<td>fed_avg*</td>",
        '<td data-order="87.5" data-search="87.5" class="first">87.5 ± 1.2</td>',
        '<td data-order="86" data-search="86" class="second"><a href="#run=1">86.0</a></td>',
        '<td data-order="" data-search="">\N{EN DASH}</td>', '<tbody class="published">', '<ul class="notes"><li>A',
    ):  # fmt: skip
        assert part in text, part
    assert "\x1b" not in text
    assert text.index("difference") < text.index("Paper")  # published rows stand below all others
    assert '<td class="long">' in Table([LABEL, Column("why", style="long")], [Row(["a", "b"])]).html()
    assert "<ul" not in Table([LABEL], []).html()


def test_terminal_and_csv(table):
    text = table.text()
    assert all(part in text for part in ("pacs ", "accuracy (%) ", "│ fed_avg* ", "87.5 ± 1.2", "│   difference "))
    assert text.endswith("- A note with 50 %.\n- *Two*\n")
    assert text.count("├") == 1
    assert list(csv.DictReader(table.csv().splitlines())) == [
        {"label": "a", "x": "0.5", "y": ""}, {"label": "b", "x": "", "y": "3"}]  # fmt: skip


def test_a_table_in_two_parts(table):
    """The second has no row of the paper, which has nothing there; the notes come once."""
    parts = [table.part([0, 1], "first"), table.part([0, 2], "second")]
    text = tables_text(parts, table.notes)
    first, second = text.split("second")
    assert ("Paper" in first, "Paper" in second) == (True, False)
    assert text.count("A note") == 1
    assert "87.5" not in second


def test_a_table_that_is_wider_than_the_terminal_is_shown_in_parts():
    """Columns of 4, 3, 3 and 5 letters need 7, 6, 6 and 8 with their lines, and one letter closes a part."""
    rows = [Row(["avg", "1.0", "2.0", "3.0 %"]), Row(["of b", "", "", "4.0 %"], "detail")]
    wide = Table([Column("who", "left"), *map(Column, ("a", "b", "c"))], rows, "pacs", "in %")
    assert wide.parts(30) == [wide]  # 9 + 6 + 6 + 8 + 1, with two letters of indent
    two = wide.parts(29)
    assert [[column.heading for column in part.columns] for part in two] == [["who", "a", "b"], ["who", "c"]]
    assert [(part.title, part.subtitle, len(part.rows)) for part in two] == [
        ("pacs", "in %", 1), ("pacs (continued)", "", 2)]  # fmt: skip
    assert [len(part.columns) for part in wide.parts(3)] == [2, 2, 2]  # a part has two columns, also where none fits
    folding = Table([LABEL, Column("why", folds=True)], [Row(["a", "b" * 99])])
    assert folding.parts(20) == [folding]


def test_output_that_goes_to_no_terminal_is_as_wide_as_needed(capsys, monkeypatch):
    wide = Table([LABEL, *[Column(f"column {number:02}") for number in range(30)]], [Row(["a", *["b" * 9] * 30])])
    monkeypatch.delenv("COLUMNS", raising=False)
    show_tables([wide], [])
    assert "column 29" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")  # somebody has said how wide it is
    show_tables([wide], ["word " * 40])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_templates_escape_and_refuse_what_is_missing():
    with pytest.raises(UndefinedError, match="is undefined"):
        fill("common/table.html")
