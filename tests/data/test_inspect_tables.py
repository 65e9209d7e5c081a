"""A table of numbers is described before training, and the file that is proposed for it runs."""

import tomllib

import numpy as np
import pandas as pd
import pytest

from fedsim.commands.data import show_inspection
from fedsim.common.errors import UserError
from fedsim.data.array_rows import EMBEDDED
from fedsim.data.benchmarks import benchmark
from fedsim.data.inspect import given_in
from fedsim.data.inspect_tables import SAYS_WHICH, inspect_npz, inspect_table, is_table_of_numbers
from fedsim.data.reader import reader
from fedsim.runs.plan import resolve
from fedsim.settings.experiment import from_table

NAMES = ["data.columns.label=disease", "data.columns.domain=hospital"]


def test_the_hospitals_are_described():
    found = inspect_table(EMBEDDED["hospitals"].file, given_in(NAMES))
    assert found.counts.to_numpy().tolist() == [[165, 139], [187, 106], [8, 115], [51, 149]]
    columns = found.columns.set_index("column")
    assert columns.loc["chol"].tolist() == ["number", "0 to 603, mean 199.1", 0, 23, 0, 7]
    assert columns.loc["sex", "values"] == "Female, Male"
    assert found.problems == [
        "trestbps is 0 in 1 of 144 rows of va_long_beach, and otherwise at least 80: if 0 means that it was not "
        'measured, set missing = {trestbps = ["0"]}',
        "chol is 0 in 123 of 123 rows of switzerland, 49 of 193 rows of va_long_beach, and otherwise at least 85: if 0 "
        'means that it was not measured, set missing = {chol = ["0"]}',
        "num alone tells the class of every row, perhaps as the label in other words; the experiment file below leaves "
        "it out of the features",
        "ca is empty in 290 of 293 rows of hungary, 118 of 123 rows of switzerland, 198 of 200 rows of va_long_beach, "
        f"and in 5 of 304 rows of cleveland: {SAYS_WHICH}",
        f"thal is empty in 265 of 293 rows of hungary, and in 3 of 304 rows of cleveland: {SAYS_WHICH}",
        "2 rows repeat another one of their domain: row 407 repeats row 406, row 909 repeats row 861",
    ]
    plan = resolve(from_table(tomllib.loads(found.experiment)))
    assert (plan.data.domains, plan.data.classes) == (tuple(found.counts.index), ("no", "yes"))
    assert "num" not in plan.experiment.data.columns["features"]
    assert '# [data.columns.missing]\n# trestbps = ["0"]\n# chol = ["0"]\n' in found.experiment


def test_constants_copies_and_names_are_found(tmp_path):
    lines = [f"p{n},{n},{1.5 * n},{5 if n < 12 else n},{'uv'[n % 2]},{'ab'[n >= 12]}" for n in range(24)]
    lines[20] = "p20,3,4.5,5,v,b"  # the values of row 5, in the other hospital
    text = "patient,count,x,y,label,domain\n" + "\n".join(lines)
    (tmp_path / "t.csv").write_text(text + "\np24,99,99,99,v,c\np25,98,98,,v,c\n")
    found = inspect_table(tmp_path / "t.csv", given_in([]))
    assert found.problems == [
        "patient has another value in every row; it is left out of the features",
        "y is 5 in all rows of a, where it has a value at all",
        "all 2 rows of c are of the class v",
        "row 5 (a) and row 22 (b) have equal features: is it one patient in two domains?",
    ]
    assert list(found.columns["column"]) == ["count", "x", "y"]


def test_a_folder_of_tables_and_an_npz_file_are_described(tmp_path):
    (tmp_path / "tables").mkdir()
    for name, start in (("north", 0), ("south", 10)):
        (tmp_path / "tables" / f"{name}.csv").write_text(f"x,label\n{start},u\n{start + 1},v\n")
    found = inspect_table(tmp_path / "tables", given_in([]))
    assert found.counts.to_dict() == {"u": {"north": 1, "south": 1}, "v": {"north": 1, "south": 1}}
    assert resolve(from_table(tomllib.loads(found.experiment))).data.shape == (1,)
    x = np.arange(24.0).reshape(4, 2, 3)
    np.savez(tmp_path / "s.npz", x=x, label=[0, 1, 0, 1], domain=["p", "p", "q", "q"])
    found = inspect_npz(tmp_path / "s.npz", given_in([]))
    assert found.columns.iloc[1].tolist() == ["q", 2, [2, 3], "12 to 23, mean 17.5"]
    assert resolve(from_table(tomllib.loads(found.experiment))).data.shape == (2, 3)


def test_what_is_given_is_in_the_printed_file_or_refused(tmp_path):
    rows = "".join(f"{n / 4},{n % 2},{'ab'[n % 4 > 1]},{('train', 'test')[n % 3 > 1]}\n" for n in range(24))
    (tmp_path / "t.csv").write_text(f"x,label,domain,part\n{rows}")
    given = ["data.task=binary", "data.columns.split=part"]
    data = tomllib.loads(inspect_table(tmp_path / "t.csv", given_in(given)).experiment)["data"]
    assert (data["task"], data["columns"]["split"]) == ("binary", "part")
    with pytest.raises(
        UserError, match=r"data\.domains: the inspection of a table of numbers looks at all of its rows"
    ):
        inspect_table(tmp_path / "t.csv", given_in(["data.domains=['a']"]))
    np.savez(tmp_path / "s.npz", x=np.arange(8.0).reshape(4, 2), label=[0, 1, 0, 1], domain=["p", "p", "q", "q"])
    found = inspect_npz(tmp_path / "s.npz", given_in(["data.task=binary", "data.domains=['p', 'q']"]))
    data = tomllib.loads(found.experiment)["data"]
    assert (data["task"], data["domains"]) == ("binary", ["p", "q"])


def test_rows_of_several_tables_have_the_numbers_of_their_files(tmp_path):
    """They were counted through all files, so that row 3 of the second one was called row 14."""
    for name in "ab":
        start = 0 if name == "a" else 100
        lines = [f"{start + n},{n * n % 7},{'uv'[n % 2]}" for n in range(11)]
        (tmp_path / f"{name}.csv").write_text("x,y,label\n" + "\n".join(lines) + "\n")
    text = (tmp_path / "b.csv").read_text()
    (tmp_path / "b.csv").write_text(text.replace("\n101,1,v\n", "\n4,2,v\n"))
    problems = inspect_table(tmp_path, given_in([])).problems
    pair = "row 6 of a.csv (a) and row 3 of b.csv (b) have equal features"
    assert f"{pair}: is it one patient in two domains?" in problems
    (tmp_path / "b.csv").write_text(text.replace("\n102,4,u\n", "\n102,4,\n"))
    with pytest.raises(UserError, match=r"b\.csv, column 'label', row 4: the label is empty"):
        inspect_table(tmp_path, given_in([]))


def test_what_the_command_prints_and_refuses(tmp_path, capsys):
    file = EMBEDDED["hospitals"].file
    with pytest.raises(
        UserError, match=r"has no column 'label'; say which one it is with --set data.columns.label=NAME"
    ):
        show_inspection(file, None)
    with pytest.raises(UserError, match="--grid draws pictures"):
        show_inspection(file, tmp_path / "g.png", NAMES)
    show_inspection(file, None, NAMES)
    output = capsys.readouterr().out
    assert 'backbone = "mlp"' in output
    assert "empty cells" in " ".join(output.split())
    assert "\u2026" not in output
    pd.DataFrame({"path": ["a.png"], "label": ["x"], "domain": ["d"]}).to_csv(tmp_path / "images.csv", index=False)
    assert not is_table_of_numbers(tmp_path / "images.csv", given_in([]))


def test_a_table_of_targets_is_described_and_its_experiment_has_the_task(tmp_path):
    """A continuous label names the task; with it the rows are of one stratum, and nothing is said of classes."""
    file = tmp_path / "t.csv"
    frame = pd.DataFrame(
        {"domain": ["a", "a", "b", "b"], "x": [1, 2, 4, 3], "days": [1.5, 2, 3, 4], "flu": [0, 1, 1, 0]}
    )
    frame.to_csv(file, index=False)
    with pytest.raises(UserError, match=r"has a fraction; .* set data.task = 'regression'"):
        inspect_table(file, given_in(["data.columns.label=days"]))
    inspection = inspect_table(file, given_in(["data.columns.label=days", "data.task=regression"]))
    assert inspection.counts["all"].to_list() == [2, 2]
    assert 'task = "regression"' in inspection.experiment
    assert not any("class" in text for text in inspection.problems)
    several = inspect_table(file, given_in(['data.columns.label=["flu"]', "data.task=multi-label"]))
    assert 'label = [\n    "flu",\n]' in several.experiment
    with pytest.raises(UserError, match=r"row 2: the label '1.5' is neither 0 nor 1"):
        inspect_table(file, given_in(['data.columns.label=["days"]', "data.task=multi-label"]))


def test_a_named_column_of_domains_must_be_there_also_beside_other_tables(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("x,label,site\n1,u,a\n2,v,b\n3,u,b\n4,v,a\n")
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    with pytest.raises(UserError, match="has no column 'hospital'; say which one it is"):
        inspect_table(file, given_in(["data.columns.domain=hospital"]))
    settings = {"data": {"dataset": "arrays", "root": str(file), "columns": {"domain": "hospital"}}}
    with pytest.raises(UserError, match=r"has no column 'hospital', which data\.columns\.domain names"):
        resolve(from_table(settings))
    assert inspect_table(file, given_in([])).problems[0].startswith("no column 'domain': the name of each file is")


def test_a_feature_that_is_empty_in_most_rows_of_one_domain_only_is_named(tmp_path):
    lines = [f"{n},{n if n < 10 or n == 19 else ''},{'uv'[n % 2]},{'ab'[n >= 10]}" for n in range(20)]
    (tmp_path / "t.csv").write_text("x,ca,label,domain\n" + "\n".join(lines) + "\n")
    inspection = inspect_table(tmp_path / "t.csv", given_in([]))
    start = "ca is empty in 9 of 10 rows of b, and in 0 of 10 rows of a: whether the cell is empty says which domain"
    assert [text for text in inspection.problems if text.startswith(start)]


def test_grades_absent_classes_and_odd_texts_are_named(tmp_path):
    """Hospital a has the grades 0 to 2 and b those of 0 and 1; sex is spelled twice, and one dose is a text."""
    lines = []
    for n in range(40):
        sex = "male" if n == 3 else ("Male", "Female")[n % 2]
        dose = "unknown" if n == 5 else "n/a" if n == 7 else str(1.5 * n)
        lines.append(f"{dose},{n * n % 37},{sex},{n % 3 if n < 20 else n % 2},{'ab'[n >= 20]}")
    file = tmp_path / "t.csv"
    file.write_text("dose,x,sex,grade,domain\n" + "\n".join(lines) + "\n")
    problems = inspect_table(file, given_in(["data.columns.label=grade"])).problems
    expected = [
        "dose has 38 numbers and 1 text: 'unknown' in row 7; correct it",
        "b: no row has the class 2, which other domains have",
        f"{file}, column 'grade': the classes are the numbers 0 to 2, perhaps grades",
        "column 'sex': 'Male' (rows: 20), 'male' (rows: 1) differ in spelling only and are 2 names",
    ]
    for start in expected:
        assert [text for text in problems if text.startswith(start)], (start, problems)
    with pytest.raises(UserError, match=r"needs two classes, and .* has 3: 0, 1, 2; write a column that has two"):
        inspect_table(file, given_in(["data.columns.label=grade", "data.task=binary"]))
    lines[5] = "1,1,Male,0,a"
    file.write_text("dose,x,sex,grade,domain\n" + "\n".join(lines) + "\n")
    problems = inspect_table(file, given_in(["data.columns.label=grade"])).problems
    assert "dose is 'n/a' in 1 row, which counts as an empty cell" in problems
    columns = {"label": "grade", "features": ["x"]}
    settings = from_table({"data": {"dataset": "arrays", "root": str(file), "columns": columns}})
    findings = reader(settings.data, benchmark(settings.data)).findings()
    assert [(finding.kind, finding.where) for finding in findings if not finding.is_grave] == [
        ("absent-classes", "b"),
        ("grades", f"{file}, column 'grade'"),
    ]
