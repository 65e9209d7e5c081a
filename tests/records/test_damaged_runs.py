"""A record that was cut off, garbled or is of another type: its run is left out and named, and no exception escapes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invented import pacs_experiment, write_run
from typer.testing import CliRunner

from fedsim.analysis import compare
from fedsim.analysis.combinations import searches
from fedsim.analysis.report import report_page
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.records import read_runs

FILES = ("environment.json", "experiment.toml", "rounds.csv", "summary.csv")
DEEP = b"[" * 100_000
DAMAGES = {
    "cut off": lambda data: data[: len(data) // 2 - 3],
    "half a line": lambda data: data[:7],
    "empty": lambda data: b"",
    "brackets": lambda data: DEEP,
    "value of brackets": lambda data: b"name = " + DEEP,
    "list": lambda data: b"[1, 2]\n",
    "number": lambda data: b"5\n",
    "zeros": lambda data: bytes(len(data)),
    "no text": lambda data: b"\xff\xfe\x00" + data,
}
DAMAGED = "csac/photo/seed1"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_run_is_left_out_and_its_file_is_named(name, damage, own_grid):
    file = own_grid / DAMAGED / name
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    runs = read_runs(own_grid)
    assert list(runs.damaged) == [DAMAGED]
    comparison = compare(runs)
    (note,) = [note for note in comparison.notes if note.startswith("Left out")]
    assert f"{DAMAGED}/{name}: " in note
    assert "copy" in note or "remove" in note
    assert "\n" not in note
    assert DAMAGED not in set(comparison.table["run"])
    assert len(comparison.table) == 7
    with pytest.raises(UserError, match=f"^{file}: "):
        read_runs(file.parent)
    if name == "rounds.csv":  # a table does not need it
        assert not read_runs(own_grid, only=["summary"]).damaged


@pytest.mark.parametrize("verb", ["compare", "plot", "report"])
@pytest.mark.parametrize("name", FILES)
def test_the_verbs_go_on_without_a_damaged_run(verb, name, own_grid, unrendered):
    """The exit code is 0 while a run can be read; a folder without any is refused in one line."""
    files = sorted(own_grid.rglob(name))
    files[0].write_bytes(b"\xff")
    shown = CliRunner().invoke(app, [verb, str(own_grid)])
    assert shown.exit_code == 0, shown.exception
    text = (own_grid / "report.html").read_text() if verb == "report" else shown.output
    if (verb, name) != ("compare", "rounds.csv"):  # a table does not need it
        assert f"{files[0].relative_to(own_grid).as_posix()}:" in "".join(text.split())
    for file in files:
        file.write_bytes(b"\xff")
    shown = CliRunner().invoke(app, [verb, str(own_grid)])
    if (verb, name) != ("compare", "rounds.csv"):
        assert isinstance(shown.exception, UserError)
        assert "none of its 8 runs can be read" in str(shown.exception)
        assert str(files[0]) in str(shown.exception)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs, and what their files hold."""
    folder = tmp_path_factory.mktemp("pair")
    runs = [write_run(folder, pacs_experiment(seed=seed, train={"rounds": 2})) for seed in (0, 1)]
    return folder / "pacs", runs[1], {name: (runs[1] / name).read_bytes() for name in (*FILES, "clients.csv")}


TOKENS = (
    b"[",
    b"{",
    b"]",
    b'"',
    b",",
    b"\n",
    b"=",
    b"\x00",
    b"\xff",
    b"-",
    b"1e999",
    b"nan",
    b"null",
    b"[[[]]]",
    b"9" * 40,
)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from((*FILES, "clients.csv")),
    start=st.floats(0, 1),
    length=st.one_of(st.integers(0, 40), st.just(10**6)),
    put=st.one_of(st.sampled_from(TOKENS), st.binary(max_size=8)),
)
def test_any_damage_is_a_note_or_one_line(name, start, length, put, pair):
    """A part of a record, at any place and of any length, is replaced by anything."""
    folder, run, contents = pair
    data = contents[name]
    place = int(start * len(data))
    (run / name).write_bytes(data[:place] + put + data[place + length :])
    try:
        line = one_line_of(folder)
    finally:
        (run / name).write_bytes(data)
    assert "\n" not in line


def one_line_of(folder):
    """The line that refuses a folder's runs; empty where they give a table and a report."""
    try:
        runs = read_runs(folder)
        assert compare(runs).render("csv")
        assert report_page(runs, {})
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "text", ["", "method\n", "method,search,rung,score,target,candidate,folds\na,b,x,0.1,photo,c,d\n", "\0"]
)
def test_a_damaged_search_is_named_in_figures(text, own_grid):
    (own_grid / "combinations.csv").write_text(text)
    if text == "method\n":
        (own_grid / "combinations.csv").write_text(f"{text}fedavg\n")
    with pytest.raises(UserError, match=r"combinations\.csv: the rows cannot be read") as error:
        searches(own_grid)
    assert "\n" not in str(error.value)


def test_a_summary_without_a_column_of_one_rule_is_named(pair):
    """The damage that hypothesis found: one character in the name of a column."""
    _, run, files = pair
    text = files["summary.csv"].replace(b"last_target_accuracy", b"last_target_accurac[y")
    (run / "summary.csv").write_bytes(text)
    with pytest.raises(UserError, match=r"summary.csv: no column \w+_target_accurac"):
        read_runs(run)
    (run / "summary.csv").write_bytes(files["summary.csv"])
