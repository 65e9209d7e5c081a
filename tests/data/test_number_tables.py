"""Tensors from .npz files, tables of numbers and torch Datasets; every fault of them is one clear line."""

import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from support import run_small
from torch.utils.data import TensorDataset

from fedsim.common.errors import UserError
from fedsim.data import arrays, benchmark, load_client, load_target
from fedsim.data.feature_tables import read_table
from fedsim.data.fingerprint import fingerprint, fingerprints
from fedsim.data.reader import reader
from fedsim.data.scaling import scale_rule
from fedsim.data.shared_images import shared_images
from fedsim.settings.experiment import from_table, read_experiment

TABLE = """age,chol,cp,sick,hospital
40,200,typical,no,a
50,?,atypical,yes,a
60,240,typical,no,a
41,210,typical,yes,b
51,220,,no,b
61,0,odd,yes,c
42,230,typical,no,c
"""
COLUMNS = {"label": "sick", "domain": "hospital", "categories": ["cp"]}


def table(tmp_path, text=TABLE, target="c", **data):
    """Data settings for a table of three hospitals."""
    (tmp_path / "t.csv").write_text(text)
    settings = {"dataset": "arrays", "root": str(tmp_path / "t.csv"), "columns": COLUMNS, "holdout": 0.34, **data}
    return from_table({"data": settings, "run": {"target": target}}).data


def test_a_row_has_its_numbers_then_its_categories(tmp_path):
    """The unseen domain's value `odd` is not known before it is tested, so that it is in the column of other values."""
    data = table(tmp_path)
    bench = benchmark(data)
    assert (bench.domains, bench.classes) == (("a", "b", "c"), ("no", "yes"))
    assert bench.features == ("age", "chol", "cp=atypical", "cp=typical", "cp=(other)")
    assert (bench.shape, bench.numeric, bench.images) == ((5,), 2, False)
    values, labels = reader(data, bench).images("a")
    assert values.dtype == np.float32
    assert np.nan_to_num(values, nan=-1).tolist() == [[40, 200, 0, 1, 0], [50, -1, 1, 0, 0], [60, 240, 0, 1, 0]]
    assert labels.tolist() == [0, 1, 0]
    assert np.nan_to_num(reader(data, bench).images("b")[0])[1].tolist() == [51, 220, 0, 0, 0]
    assert load_target(data, "c", bench)[0].tolist() == [[61, 0, 0, 0, 1], [42, 230, 0, 1, 0]]


def test_rows_of_categories_alone_are_not_standardized(tmp_path):
    columns = {**COLUMNS, "features": ["cp"]}
    data = table(tmp_path, columns=columns)
    bench = benchmark(data)
    assert (bench.numeric, scale_rule(data, bench)) == (0, "none")
    given = [
        "data.dataset=arrays", f"data.root={data.root}", "run.target=c", f"run.output={tmp_path}", "train.rounds=1",
        "data.columns={label='sick', domain='hospital', features=['cp'], categories=['cp']}", "data.holdout=0.34",
        "model.backbone=linear",
    ]  # fmt: skip
    (tmp_path / "t.csv").write_text(TABLE + TABLE.partition("\n")[2])  # a client needs two training rows
    folder, _ = run_small(read_experiment("digits", given))
    assert np.isfinite(pd.read_csv(folder / "rounds.csv")["target_loss"]).all()


def test_labels_in_a_unit_too_large_are_refused(tmp_path):
    """Errors of 1e-10 farad would all be equal, because scores are compared to nine decimals."""
    text = "x,label,domain\n" + "".join(f"{n},{n + 1}e-11,{'ab'[n % 2]}\n" for n in range(8))
    labelled = table(tmp_path, text, "a", task="regression", columns={})
    with pytest.raises(
        UserError, match=r"the largest label is [78]e-11, and errors are compared to nine decimals; write"
    ):
        reader(labelled, benchmark(labelled))
    text = text.replace("e-11", "")
    labelled = table(tmp_path, text, "a", task="regression", columns={})
    assert reader(labelled, benchmark(labelled)).masks("b").tolist() == [[2], [4], [6], [8]]


def test_missing_values_are_named_marked_or_left_out(tmp_path):
    data = table(tmp_path, missing="indicator", columns={**COLUMNS, "missing": {"chol": ["0"]}})
    bench = benchmark(data)
    assert bench.features[:4] == ("age", "chol", "age is empty", "chol is empty")
    first = reader(data, bench).images("c")[0][0]
    assert np.isnan(first[1])
    assert first[2:4].tolist() == [0, 1]
    data = table(tmp_path, missing="drop", columns={**COLUMNS, "missing": {"chol": ["0"]}})
    read = reader(data, benchmark(data))
    assert [len(read.labels(domain)) for domain in "abc"] == [2, 1, 1]


def test_columns_may_be_chosen_and_categories_declared(tmp_path):
    columns = {**COLUMNS, "features": ["cp", "age"], "categories": {"cp": ["typical", "odd"]}}
    assert benchmark(table(tmp_path, columns=columns)).features == ("age", "cp=typical", "cp=odd", "cp=(other)")


def test_a_table_is_read_once_for_all_unseen_domains_unless_categories_depend_on_the_sources(tmp_path, monkeypatch):
    """With 1,935 cells of the vowels' 15 unseen speakers the plan of a sweep spent most of its time in reading."""
    reads = []
    monkeypatch.setattr(arrays, "read_table", lambda file: reads.append(file) or read_table(file))
    numbers = table(tmp_path, columns={"label": "sick", "domain": "hospital", "features": ["age"]})
    for target in "abc":
        benchmark(numbers.model_copy(update={"unseen_domain": target}))
    assert len(reads) == 1
    categories = {target: benchmark(table(tmp_path, target=target)).features[2:] for target in "abc"}
    assert categories == {
        "a": ("cp=odd", "cp=typical", "cp=(other)"),
        "b": ("cp=atypical", "cp=odd", "cp=typical", "cp=(other)"),
        "c": ("cp=atypical", "cp=typical", "cp=(other)"),
    }


def test_digests_are_computed_once_for_all_runs_of_a_process(tmp_path):
    data = table(tmp_path)
    first, later = (reader(data, benchmark(data)) for _ in range(2))
    assert first is not later
    assert first.digests("a") is later.digests("a")
    assert first.digests("a").shape == (3, 10)


def test_an_unseen_domain_in_another_unicode_form_adds_no_categories(tmp_path):
    text = TABLE.replace(",c\n", ",Z\u00fcrich\n")
    features = [benchmark(table(tmp_path, text, target)).features for target in ("Z\u00fcrich", "Zu\u0308rich")]
    assert "cp=odd" not in features[0]
    assert features[0] == features[1]


def test_true_and_false_are_numbers_and_parquet_is_read(tmp_path):
    frame = pd.DataFrame({"x": [True, False, None], "y": [1.5, 2.0, np.nan], "label": [1, 2, 1], "domain": list("aab")})
    frame.to_parquet(tmp_path / "t.parquet")
    data = from_table({"data": {"dataset": "arrays", "root": str(tmp_path / "t.parquet")}}).data
    bench = benchmark(data)
    assert bench.classes == ("1", "2")  # labels are names, so that they may count from 1
    assert reader(data, bench).images("a")[0].tolist() == [[1, 1.5], [0, 2]]
    assert np.isnan(reader(data, bench).images("b")[0]).all()


def test_a_folder_has_a_file_for_each_domain(tmp_path):
    for name, start in (("north", 0), ("south", 10)):
        (tmp_path / f"{name}.csv").write_text(f"x,label\n{start},u\n{start + 1},v\n")
    data = from_table({"data": {"dataset": "arrays", "root": str(tmp_path)}}).data
    bench = benchmark(data)
    assert bench.domains == ("north", "south")
    assert reader(data, bench).images("south")[0].tolist() == [[10], [11]]


def npz(tmp_path, **arrays):
    """Data settings for an .npz file of two domains."""
    x = np.arange(24, dtype=np.float64).reshape(4, 2, 3)
    usual = {"x": x, "label": np.array([1, 2, 1, 2]), "domain": np.array(["p", "p", "q", "q"])}
    named = {name: value for name, value in {**usual, **arrays}.items() if value is not None}
    np.savez(tmp_path / "s.npz", **named)
    return from_table({"data": {"dataset": "arrays", "root": str(tmp_path / "s.npz")}}).data


def test_an_npz_file_is_read(tmp_path):
    data = npz(tmp_path, split=np.array(["train", "val", "", "test"]))
    bench = benchmark(data)
    assert (bench.shape, bench.numeric, bench.classes, bench.domains) == ((2, 3), 2, ("1", "2"), ("p", "q"))
    read = reader(data, bench)
    values, labels = read.images("q")
    assert values.tolist() == [[[12, 13, 14], [15, 16, 17]], [[18, 19, 20], [21, 22, 23]]]
    assert labels.tolist() == [0, 1]
    assert read.listed("p", "validation").tolist() == [1]
    assert read.listed("q", "train") is None


def test_arrays_may_have_other_names(tmp_path):
    np.savez(tmp_path / "s.npz", x=np.ones((2, 3)), exercise=[0, 1], person=[7, 8])
    columns = {"label": "exercise", "domain": "person"}
    settings = {"dataset": "arrays", "root": str(tmp_path / "s.npz"), "columns": columns}
    assert benchmark(from_table({"data": settings}).data).domains == ("7", "8")
    others = {"label": [5, 6], "domain": [1, 1], "split": ["train", "test"]}
    np.savez(tmp_path / "s.npz", x=np.ones((2, 3)), exercise=[0, 1], person=[7, 8], fold=["test", "train"], **others)
    data = from_table({"data": {**settings, "columns": {**columns, "split": "fold"}}}).data
    bench = benchmark(data)
    assert (bench.domains, bench.classes) == (("7", "8"), ("0", "1"))
    assert reader(data, bench).listed("7", "test").tolist() == [0]


@pytest.mark.parametrize("columns", [{"features": ["0"]}, {"missing": {"0": ["0"]}}, {"categories": {"0": ["1", "2"]}}])
def test_columns_of_tables_are_refused_for_arrays(tmp_path, columns):
    """A choice of features was dropped without a word, so that all of them trained."""
    [name] = columns
    with pytest.raises(UserError, match=f"data.columns.{name} is for tables"):
        benchmark(npz(tmp_path).model_copy(update={"columns": columns}))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": None}, "has no array 'x'"),
        ({"label": None}, "has no array 'label'"),
        ({"x": np.zeros((3, 2))}, "label has the shape [4], but x has 3 examples"),
        ({"x": np.zeros(4)}, "x is float64 of the shape [4]; it must be numbers [N, ...]"),
        ({"x": np.full((4, 2), "a")}, "x is <U1"),
        ({"x": np.array([[1.0], [np.nan], [1], [1]])}, "x[1] holds NaN or infinity"),
        ({"label": np.array([0.5, 1, 1, 1])}, "the label '0.5' has a fraction"),
        ({"label": np.array([1, 1, 1, 1])}, "the labels are all 1; at least 2 classes are needed"),
        ({"split": np.array(["train", "tset", "", ""])}, "'tset' is no part of a split; did you mean 'test'?"),
        ({"x": np.array([[1], [None], [1], [1]], dtype=object)}, "cannot read "),
    ],
)
def test_what_is_no_npz_of_tensors_is_refused_in_one_line(tmp_path, arrays, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        benchmark(npz(tmp_path, **arrays))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("50,?", "5o,?", "t.csv, column 'age', row 3: '5o' is no number; correct it, name the column in data.columns"),
        ("50,?", "inf,?", "t.csv, column 'age', row 3: 'inf' is not finite"),
        ("50,?,atypical,yes", "50,?,atypical,", "t.csv, column 'sick', row 3: the label is empty"),
        ("no,a\n50", "no,\n50", "t.csv, row 2: the column 'hospital' is empty"),
        ("yes", "no", "the labels are all no; at least 2 classes are needed"),
        ("age,chol", "age,age", "t.csv has 2 columns 'age'"),
        (TABLE[TABLE.index("\n") :], "\n", "t.csv has no rows"),
        (",sick", ",ill", "t.csv has no column 'sick'"),
        ("51,220,,no,b", "51,220,,No,b", "the labels 'No' and 'no' differ in spelling only"),
    ],
)
def test_faults_of_a_table_are_one_line(tmp_path, old, new, message):
    assert old in TABLE
    data = table(tmp_path, TABLE.replace(old, new))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        benchmark(data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"feature": ["age"]}, "data.columns: no key 'feature'; did you mean 'features'?"),
        ({"features": "age"}, "data.columns.features: write a list of columns"),
        ({"features": ["agee"]}, "has no column 'agee' (data.columns); did you mean 'age'?"),
        ({"features": ["age", "sick"], "label": "sick"}, "'sick' is a feature, and also the label"),
        ({"features": ["age"], "categories": ["cp"]}, "data.columns.categories: 'cp' is none of data.columns.features"),
        (
            {"features": ["age"], "missing": {"cp": ["0"]}},
            "data.columns.missing: 'cp' is none of data.columns.features",
        ),
        ({"missing": ["chol"]}, "data.columns.missing: write a table"),
        ({"label": ["sick"]}, "data.columns.label: ['sick'] is not the name of one column"),
    ],
)
def test_faults_of_columns_are_one_line(tmp_path, columns, message):
    with pytest.raises(UserError, match=re.escape(message)):
        benchmark(table(tmp_path, columns=columns))


def test_a_column_without_a_value_at_one_hospital_is_read_unless_its_rows_are_dropped(tmp_path):
    text = "x,y,label,domain\n1,2,u,a\n2,3,v,a\n3,,u,b\n4,,v,b\n5,5,u,c\n6,6,v,c\n"
    data = table(tmp_path, text, columns={})
    values, _ = reader(data, benchmark(data)).images("b")
    assert np.isnan(values[:, 1]).all()
    with pytest.raises(UserError, match=r"b: every row has an empty cell, so that data.missing = 'drop' leaves none"):
        benchmark(table(tmp_path, text, columns={}, missing="drop"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {**COLUMNS, "split": "fold"}}, "t.csv has no column 'fold', which data.columns.split names; "),
        ({"columns": COLUMNS, "shape": [7]}, "data.shape = [7]: the examples here have the shape [5]; leave it out"),
    ],
)
def test_what_the_settings_say_of_a_table_must_be_so(tmp_path, settings, message):
    """A column of splits that is misspelled would be a feature."""
    with pytest.raises(UserError, match=re.escape(message)):
        benchmark(table(tmp_path, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"domain": "plcae"}}, "t.npz has no array 'plcae' (data.columns.domain); did you mean 'place'? "),
        ({"columns": {"domain": "place", "split": "fold"}}, "t.npz has no array 'fold' (data.columns.split); it has: "),
        ({"columns": {"domain": "place"}, "missing": "drop"}, "data.missing is for tables, and these examples have no"),
    ],
)
def test_what_the_settings_say_of_arrays_must_be_so(tmp_path, settings, message):
    np.savez(tmp_path / "t.npz", x=np.ones((4, 2)), label=[0, 1, 0, 1], place=list("aabb"))
    with pytest.raises(UserError, match=re.escape(message)):
        benchmark(table(tmp_path, **{"root": str(tmp_path / "t.npz"), **settings}))


def test_empty_cells_need_a_scale(tmp_path):
    data = table(tmp_path, scale="none")
    with pytest.raises(UserError, match=r"a: some cells are empty, and data.scale = 'none' gives them no value"):
        load_client(data, "a", "c")


def test_empty_cells_need_a_scale_where_clients_have_rows_of_several_domains_too(tmp_path):
    data = table(tmp_path, scale="none", mix=0.5)
    with pytest.raises(UserError, match=r"a: some cells are empty, and data.scale = 'none' gives them no value"):
        load_client(data, "a", "c")


def test_with_scale_site_each_domain_has_its_own_scale(tmp_path):
    text = "x,label,domain\n" + "".join(
        f"{v},{'uv'[v % 2]},{d}\n" for d, s in (("a", 0), ("b", 9)) for v in range(s, s + 8)
    )
    data = table(tmp_path, text, "b", columns={}, scale="site")
    client = load_client(data, "a", "b")
    assert client.images[client.train].mean() == pytest.approx(0, abs=1e-6)
    assert client.images[client.train].std() == pytest.approx(1, abs=1e-6)
    assert load_target(data, "b")[0].mean() == pytest.approx(0, abs=1e-6)


def test_fingerprints_follow_values_and_labels_and_equal_domains_are_refused(tmp_path):
    before = fingerprint(table(tmp_path), "a")["content"]
    assert fingerprint(table(tmp_path, TABLE.replace("40,200", "40,201")), "a")["content"] != before
    assert fingerprint(table(tmp_path, TABLE.replace("typical,no,a", "typical,yes,a", 1)), "a")["content"] != before
    same = "x,label,domain\n1,u,a\n2,v,a\n2,v,b\n1,u,b\n"
    with pytest.raises(UserError, match=r"the domains 'a' and 'b' .* have the same 2 "):
        fingerprints(table(tmp_path, same, "b", columns={}))


def test_a_patient_in_two_hospitals_is_a_note_and_no_refusal(tmp_path):
    text = TABLE + "40,200,typical,no,c\n"
    shared = shared_images(table(tmp_path, text), "c")
    shared.refuse()
    assert shared.notes()[0].startswith("1 of the 3 rows of c (33.3 %) are also in a (1), value for value")


MAPPED = {
    "a": TensorDataset(torch.arange(6.0).view(3, 2), torch.tensor([1, 2, 1])),
    "b": TensorDataset(torch.ones(2, 2), torch.tensor([3, 3])),
}
ODD = {**MAPPED, "b": TensorDataset(torch.ones(2, 3), torch.tensor([3, 3]))}


def mapped() -> dict[str, TensorDataset]:
    return MAPPED


def settings() -> dict[str, str]:
    raise AssertionError("a function that is not declared to return Datasets was called")


def test_another_function_is_not_called():
    with pytest.raises(UserError, match="test_number_tables:settings"):
        benchmark(from_table({"data": {"dataset": "test_number_tables:settings"}}).data)


@pytest.mark.parametrize("name", ["MAPPED", "mapped"])
def test_a_mapping_from_domains_to_datasets_is_a_data_set(name):
    data = from_table({"data": {"dataset": f"test_number_tables:{name}"}}).data
    bench = benchmark(data)
    assert (bench.domains, bench.classes, bench.shape) == (("a", "b"), ("1", "2", "3"), (2,))
    values, labels = reader(data, bench).images("a")
    assert values.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert labels.tolist() == [0, 1, 0]


def test_a_mapping_that_is_replaced_is_read_anew(monkeypatch):
    """As in a notebook, where a cell is run again."""
    data = from_table({"data": {"dataset": "test_number_tables:MAPPED"}}).data
    assert benchmark(data).shape == (2,)
    monkeypatch.setattr(sys.modules["test_number_tables"], "MAPPED", {"a": MAPPED["a"], "c": MAPPED["b"]})
    assert benchmark(data).domains == ("a", "c")


def test_datasets_of_two_shapes_are_refused():
    message = re.escape("examples of 'b' have the shape [3], but those of 'a' have [2]")
    with pytest.raises(UserError, match=message):
        benchmark(from_table({"data": {"dataset": "test_number_tables:ODD"}}).data)


def test_a_server_without_data_needs_names_and_a_shape(tmp_path):
    usual = {"dataset": "arrays", "root": str(tmp_path / "no"), "domains": ["b", "a"], "classes": ["10", "9"]}
    bench = benchmark(from_table({"data": {**usual, "shape": [3, 16]}}).data)
    assert (bench.domains, bench.classes, bench.shape, bench.numeric) == (("a", "b"), ("9", "10"), (3, 16), 3)
    columns = {"features": ["age", "cp"], "categories": {"cp": ["x", "y"]}}
    assert benchmark(from_table({"data": {**usual, "columns": columns}}).data).shape == (4,)
    with pytest.raises(UserError, match=r"a server without data needs data.shape, or data.columns.features"):
        benchmark(from_table({"data": usual}).data)


def test_a_table_of_numbers_is_no_table_of_images(tmp_path):
    (tmp_path / "n.csv").write_text("age,label,domain\n1,u,a\n2,v,b\n")
    with pytest.raises(UserError, match=r"a table of numbers is data.dataset = 'arrays'"):
        benchmark(from_table({"data": {"dataset": "table", "root": str(tmp_path / "n.csv")}}).data)
    named = {"dataset": "table", "root": str(tmp_path / "n.csv"), "columns": {"path": "age"}}
    with pytest.raises(UserError, match=r"the column 'age' holds numbers and no names of files; .*'arrays'"):
        benchmark(from_table({"data": named}).data)


def test_categories_that_would_be_other_inputs_without_an_error_are_found(tmp_path):
    """Hospital b's file came from floats, and it writes Past; `none` is a text of an empty cell."""
    text = "age,cp,smoke,sick,hospital\n40,1,none,no,a\n50,2,past,yes,a\n41,1.0,none,yes,b\n51,2.0,Past,no,b\n"
    columns = {**COLUMNS, "categories": {"cp": ["1", "2"], "smoke": ["none", "past"]}}
    data = table(tmp_path, text, target="b", columns=columns)
    read = reader(data, benchmark(data))
    findings = read.value_findings()
    assert read.findings() == []  # which a site sends to the server
    assert [finding.kind for finding in findings] == ["numbers", "numbers", "spelling", "empty-category"]
    assert [finding.is_grave for finding in findings] == [True, True, False, False]
    assert "column 'cp': one number is written in 2 forms, '1' (rows: 1), '1.0' (rows: 1)" in findings[0].line
    assert "column 'smoke': the category 'none' (rows: 2) counts as an empty cell" in findings[3].line
    columns = {**COLUMNS, "features": ["age", "cp"], "categories": ["cp"]}
    unnamed = table(tmp_path, text, target="b", columns=columns)
    assert [finding.kind for finding in reader(unnamed, benchmark(unnamed)).value_findings()] == ["numbers"] * 2


def test_a_declared_category_may_have_any_unicode_form(tmp_path):
    text = "age,cp,sick,hospital\n40,caf\u00e9,no,a\n50,tea,yes,a\n41,tea,yes,b\n51,cafe\u0301,no,b\n"
    columns = {**COLUMNS, "categories": {"cp": ["cafe\u0301", "tea"]}}
    data = table(tmp_path, text, target="b", columns=columns)
    read = reader(data, benchmark(data))
    assert read.images("a")[0][:, 1:].tolist() == [[1, 0, 0], [0, 1, 0]]
    assert read.images("b")[0][:, 1:].tolist() == [[0, 1, 0], [1, 0, 0]]


def test_columns_that_the_first_of_several_files_lacks_are_named(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.csv").write_text("age,sick\n40,no\n50,yes\n")
    (folder / "b.csv").write_text("age,chol,sick\n41,200,no\n51,210,yes\n")

    def kinds(columns):
        settings = {"dataset": "arrays", "root": str(folder), "columns": columns}
        data = from_table({"data": settings, "run": {"target": "b"}}).data
        return [finding.kind for finding in reader(data, benchmark(data)).value_findings()]

    assert kinds({"label": "sick"}) == ["left-out"]
    assert kinds({"label": "sick", "features": ["age"]}) == []
