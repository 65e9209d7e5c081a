"""results.csv grows by a line when a run ends, and has the bytes of a file that is made anew from all summaries."""

import pytest
from invented import pacs_experiment, write_run

from fedsim.records import results
from fedsim.records.results import add_result, write_results


@pytest.fixture
def runs(own_grid):
    """The folder of eight finished runs, and two more that have finished after it was written."""
    write_results(own_grid)
    later = [
        write_run(own_grid.parent, pacs_experiment("fedavg", "photo", seed, train={"rounds": 1})) for seed in (9, 7)
    ]
    return own_grid, later


def test_a_row_is_appended_without_a_look_at_the_other_runs(runs, monkeypatch):
    folder, later = runs
    file = folder / "results.csv"
    before = file.read_text()
    monkeypatch.setattr(results, "find_runs", lambda folder: pytest.fail("all runs were looked at"))
    for run in later:
        add_result(folder, run)
    rows = [(run / "summary.csv").read_text().splitlines(keepends=True)[1] for run in later]
    assert file.read_text() == before + "".join(rows)
    monkeypatch.undo()
    write_results(folder)
    lines = file.read_text().splitlines(keepends=True)
    assert [line for line in lines if line in rows] == rows[::-1]  # seed 7 comes before seed 9
    assert sorted(lines) == sorted([*before.splitlines(keepends=True), *rows])


@pytest.mark.parametrize("damage", [
    lambda file: file.unlink(),
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:-1]),
    lambda file: file.write_bytes(file.read_bytes()[:-30]),
    lambda file: file.write_bytes(file.read_bytes()[:20]),
    lambda file: file.write_bytes(file.read_bytes().replace(b",seed,", b",seeds,", 1)),
])  # fmt: skip
def test_a_file_that_a_killed_writer_left_is_made_anew(runs, damage):
    """Of a line that was cut off only the end is missing: a line without its end is no line."""
    folder, later = runs
    file = folder / "results.csv"
    write_results(folder)
    whole = file.read_bytes()
    damage(file)
    add_result(folder, later[1])
    assert file.read_bytes() == whole


def test_a_run_with_fewer_columns_has_empty_cells_and_one_with_more_makes_the_file_anew(runs):
    folder, (first, second) = runs
    summary = first / "summary.csv"
    header, row = summary.read_text().splitlines()
    summary.write_text(f"{header},validation_domain\n{row},art\n")
    add_result(folder, first)
    lines = (folder / "results.csv").read_text().splitlines()
    assert len(lines) == 1 + 8 + 2
    assert lines[0] == f"{header},validation_domain"
    assert sorted(line.rpartition(",")[2] for line in lines[1:]) == [""] * 9 + ["art"]
    add_result(folder, second)
    assert (folder / "results.csv").read_text().splitlines()[-1] == (second / "summary.csv").read_text().splitlines()[
        1
    ] + ","
