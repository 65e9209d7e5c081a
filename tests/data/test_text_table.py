"""Tables of texts: their columns by distinct text, the shipped table without pandas, and which texts are numbers."""

import math

import numpy as np
import pandas as pd
import pytest

from fedsim.common.errors import UserError
from fedsim.data import benchmark, load_client
from fedsim.data.array_rows import EMBEDDED
from fedsim.data.feature_tables import is_empty, names_of_labels, numbers_of, read_table, refuse_blank_rows
from fedsim.data.fingerprint import fingerprints
from fedsim.data.inspect_tables import inspect_table
from fedsim.data.text_table import FIRST_ROW, Cells, TextTable, number_of, read_shipped
from fedsim.settings import DataSettings

TEXTS = ["a", "b", "a", "", "b", "a"]


@pytest.mark.parametrize(
    "column", [TEXTS, np.array(TEXTS, dtype=object), pd.Series(TEXTS), pd.Series(TEXTS, dtype=object)]
)
def test_a_function_is_called_once_for_each_distinct_text(column):
    cells = Cells.of(column)
    asked = []
    assert cells.each(lambda text: asked.append(text) or text.upper()).tolist() == ["A", "B", "A", "", "B", "A"]
    assert asked == ["a", "b", ""]
    assert (len(cells), cells.text(4)) == (6, "b")
    late = cells.chosen(cells.rows >= 3)
    assert (late.rows.tolist(), [late.text(position) for position in range(3)]) == ([3, 4, 5], ["", "b", "a"])
    assert list(cells.chosen(np.array([True, False, True, False, False, True])).texts) == ["a"]


@pytest.mark.parametrize("file", [shipped.file for shipped in EMBEDDED.values()])
def test_a_shipped_table_is_read_as_pandas_reads_it(file):
    shipped, read = read_shipped(file), read_table(file)
    assert list(shipped.columns) == list(read.columns)
    for name in shipped.columns:
        assert list(shipped.columns[name]) == list(read.columns[name])
    assert shipped.rows.tolist() == read.rows.tolist()


def test_rows_keep_their_numbers():
    """They are named in messages, also after other rows were left out."""
    table = TextTable.of(pd.DataFrame({"x": ["1", "2", "z"], "y": ["p", "", "q"]}))
    late = table.chosen(np.array([False, True, True]))
    assert (len(late), "x" in late, "z" in late) == (2, True, False)
    assert is_empty(late["y"]).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"t\.csv, row 4: 'z' is no number"):
        numbers_of(late["x"], np.zeros(2, bool), "t.csv")
    assert late.frame().index.tolist() == [1, 2]


NUMBERS = [
    "1", "-2.5", "+.5", "5.", "1e3", "1E-3", "inf", "-Infinity", "007",
    "0x10", "1_000", "1,5", "\N{DEVANAGARI DIGIT ONE}", ".", "", "1e", "--1", "x", "1 2",
]  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS)
def test_the_same_texts_are_numbers_as_for_pandas(text):
    expected = pd.to_numeric(pd.Series([text]), errors="coerce")[0]
    number = number_of(text)
    assert number == expected or (math.isnan(number) and math.isnan(expected))


def test_further_texts_of_an_empty_cell_are_compared_as_numbers_too():
    assert is_empty(Cells.of(["0", "0.0", "00", "x", "NA", "-", "1"]), ["0", "-", "nan"]).tolist() == [
        True, True, True, False, True, True, False,
    ]  # fmt: skip


def test_a_missing_text_is_an_empty_one():
    """pandas gives a missing value the place -1, which is that of the last text."""
    cells = Cells.of(pd.Series(["1", None, "2"], dtype=object))
    assert cells.each(str).tolist() == ["1", "", "2"]


def test_names_of_classes_keep_all_digits():
    """As floats two codes of 18 digits were one class, and 1_0 was 10, as Python reads it."""
    texts = ["900000000000207008", "900000000000207009", "1_0", "10", "3.0", "-2", "007", "1e3", "e\u0301"]
    names = ["900000000000207008", "900000000000207009", "1_0", "10", "3", "-2", "7", "1000", "\u00e9"]
    assert names_of_labels(Cells.of(texts), "t.csv").tolist() == names


@pytest.mark.parametrize("text", ["a,b\n1,2\n\n3,4\n", "a,b\r\n1,2\r\n \r\n3,4\r\n", "a\n1\n\n2\n"])
def test_a_blank_row_would_give_the_rows_below_it_other_numbers(tmp_path, text):
    """The prediction for the patient in row 4 was called that of row 3, which is blank."""
    file = tmp_path / "t.csv"
    file.write_text(text, newline="")
    assert len(read_table(file)) == 2
    with pytest.raises(UserError, match=r"t\.csv, row 3: it is blank"):
        refuse_blank_rows(file)


def test_messages_have_the_numbers_of_rows_below_blank_ones(tmp_path):
    """Rows 1 (above the header) and 4 are blank, and row 6 is at fault."""
    file = tmp_path / "t.csv"
    start = "\npath,label,domain\na.png,cat,x\n \nb.png,dog,y\n"
    file.write_text(start)
    assert [row + FIRST_ROW for row in read_table(file).rows] == [3, 5]
    file.write_text(start + "b.png,dog,x\n")
    with pytest.raises(UserError, match=r"'b.png' has more than one row \(rows 5 and 6\)"):
        fingerprints(DataSettings(dataset="table", root=str(file)))
    file.write_text(start + "c.png,,x\n")
    with pytest.raises(UserError, match=r"t\.csv, row 6: the column 'label' is empty"):
        benchmark(DataSettings(dataset="table", root=str(file)))
    file.write_text(start + "c.png,dog,y\n")
    with pytest.raises(UserError, match=r"t\.csv, row 5, column 'path': no file 'b.png'"):
        load_client(DataSettings(dataset="table", root=str(file)), "y")
    for rows, fault in (("1,2,\n", "the column 'domain' is empty"), ("1,,x\n", "the label is empty")):
        file.write_text("\na,label,domain\n3,1,x\n\n4,2,y\n" + rows)
        with pytest.raises(UserError, match=rf"row 6: {fault}"):
            benchmark(DataSettings(dataset="arrays", root=str(file)))
    with pytest.raises(UserError, match="row 6: the label is empty"):
        inspect_table(file, DataSettings(dataset="arrays"))


@pytest.mark.parametrize("text", ["a,b\n1,2\n,\n3,4\n\n\n", 'a,b\n"1\n\n",2\n3,4\n', 'a\n1\n""\n2\n'])
def test_other_rows_are_not_blank(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    refuse_blank_rows(tmp_path / "t.csv")
