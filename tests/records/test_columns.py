"""A run reads its own records without pandas, and sees in them what pandas sees."""

import math

import numpy as np
import pandas as pd
import pytest

from fedsim.common.errors import UserError
from fedsim.records.columns import Columns
from fedsim.records.record_files import read_columns, read_record


def written(tmp_path, text, name="rounds.csv"):
    file = tmp_path / name
    file.write_text(text)
    return file


def test_columns_are_those_of_a_frame(own_grid):
    for name in ("rounds.csv", "summary.csv"):
        for file in sorted(own_grid.rglob(name))[:3]:
            columns, frame = read_columns(file), read_record(file)
            assert columns.columns == list(frame.columns)
            assert len(columns) == len(frame)
            for column in frame:
                np.testing.assert_array_equal(columns[column], frame[column].to_numpy())


def test_empty_cells_truths_and_an_incomplete_line(tmp_path):
    columns = read_columns(written(tmp_path, "round,method,a,b\n0,nan,,True\n1,2,nan,False\n2,x,0.1,\n3,y,0."))
    assert columns["method"].tolist() == ["nan", "2", "x"]
    np.testing.assert_array_equal(columns["a"], [math.nan, math.nan, 0.1])
    np.testing.assert_array_equal(columns["b"], [1.0, 0.0, math.nan])
    late = columns.chosen(columns["round"] >= 1)
    assert late.row(0)["method"] == "2"
    assert "c" not in late
    assert len(late) == 2
    assert len(read_columns(tmp_path / "nothing.csv")) == len(read_columns(written(tmp_path, "round,a\n0,"))) == 0


@pytest.mark.parametrize(("name", "text", "said"), [
    ("rounds.csv", "turn,a\n1,2\n", "it has no column 'round'"),
    ("rounds.csv", "round,a\n1,two\n", "'a' has text in place of numbers"),
    ("rounds.csv", "round,a\n1\n", "'a' has text in place of numbers"),
    ("summary.csv", "method,target\na,b\n", "it has no column 'seed'"),
    ("summary.csv", "method,target,seed\na,b,0\n", "it lacks 'best_validation_round'"),
])  # fmt: skip
def test_a_damaged_record_is_named(tmp_path, name, text, said):
    file = written(tmp_path, text, name)
    with pytest.raises(UserError, match=rf"{name}: {said}"):
        read_columns(file)


def test_a_frame_is_taken_as_it_is():
    frame = pd.DataFrame({"round": [0, 1], "a": [None, 2.0]}, index=[7, 3])
    columns = Columns.of(frame)
    assert Columns.of(columns) is columns
    assert columns.row(1) == {"round": 1, "a": 2.0}
    np.testing.assert_array_equal(columns.numbers("a"), [math.nan, 2.0])
