"""Tables of images: CSV, TSV and Parquet, with any order, spelling and size."""

import sys

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import benchmark, load_client, load_target
from fedsim.data.fingerprint import fingerprints
from fedsim.data.reader import numbers_of_groups, reader
from fedsim.settings import DataSettings


def row_of(index: int) -> dict:
    domain, label = ("Été 2", "7")[index % 2], ("cat", "dog", "vélo")[index % 3]
    label = "dog" if domain == "7" and label == "vélo" else label
    split = ("train", "val", "test")[index // 2 % 3]
    return {"path": f"images of/é{index}.png", "label": label, "domain": domain, "split": split, "note": "a, b"}


ROWS = pd.DataFrame([row_of(index) for index in range(24)])


@pytest.fixture
def table(tmp_path):
    """Function (frame, suffix, settings) -> settings of a table of 24 images of two domains and three classes."""
    (tmp_path / "images of").mkdir()
    for index, path in enumerate(ROWS["path"]):
        Image.new("RGB", (9, 7), (10 * index, 0, 0)).save(tmp_path / path)

    def make(frame=ROWS, suffix=".csv", **settings):
        file = tmp_path / f"mine{suffix}"
        if suffix == ".parquet":
            frame.to_parquet(file)
        else:
            frame.to_csv(file, index=False, sep="\t" if suffix == ".tsv" else ",", encoding="utf-8-sig")
        return DataSettings(dataset="table", root=str(file), image_size=8, cache=str(tmp_path / "cache"), **settings)

    return make


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_table_gives_domains_classes_and_images(table, suffix, monkeypatch):
    """The order of the rows and how many are read at a time change nothing."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr("fedsim.data.tables.PIECE", 5)
    data = table(ROWS.sample(frac=1, random_state=1), suffix)
    found = benchmark(data)
    assert (found.domains, found.classes) == (("7", "Été 2"), ("cat", "dog", "vélo"))
    images, labels, indices = load_target(data, "Été 2")
    assert (images.shape, len(indices)) == ((12, 3, 8, 8), 12)
    own = ROWS[ROWS["domain"] == "Été 2"].sort_values(["label", "path"])
    assert [found.classes[label] for label in labels] == own["label"].tolist()
    assert images[:, 0, 0, 0].tolist() == [10 * index for index in own.index]
    assert load_client(data, "7").class_counts()[2] == 0  # a class may be absent
    assert benchmark(data.model_copy(update={"domains": ["7"]})).classes == ("cat", "dog")  # of the used domains
    read = reader(data, found)
    for domain in found.domains:
        np.testing.assert_array_equal(read.labels(domain), read.images(domain)[1])


def test_the_split_column(table):
    """It says which images are train, val and test, so that it is part of the fingerprint; other words are not used."""
    data = table(split="lists", test_split="list")
    client, tested = load_client(data, "Été 2"), load_target(data, "Été 2")[2]
    assert (len(client.train), len(client.validation), len(tested)) == (4, 4, 4)
    assert not set(client.train) & set(tested)
    before = fingerprints(data)
    assert fingerprints(data.model_copy(update={"image_size": 9})) == before
    other = ROWS.replace({"split": {"val": "test", "test": "val"}})
    assert fingerprints(table(other, split="lists", test_split="list"))["7"] != before["7"]
    assert benchmark(data).joined == ()
    assert benchmark(table(ROWS)).joined == tuple(
        f"{name} ({count} images)" for name, count in sorted(ROWS["split"].value_counts().items()) if name
    )
    unused = ROWS.replace({"split": {"val": ""}})
    assert len(load_client(table(unused, split="lists", holdout=0.25), "7").train) == 3
    assert len(load_client(table(ROWS.replace({"split": {"val": "dev"}})), "7").labels) == 12


def test_a_group_in_two_unicode_forms_is_one(table):
    """Of "é" as one sign and as two; a file system may give folders of one name in both forms."""
    patients = [("Ren\u00e9", "Rene\u0301", "Ada")[index // 2 % 3] for index in range(24)]
    data = table(ROWS.assign(patient=patients), columns={"group": "patient"})
    assert len(set(reader(data, benchmark(data)).groups("7"))) == 2
    assert numbers_of_groups(["Ren\u00e9", "Rene\u0301", "Ada"]).tolist() == [1, 1, 0]


TWO = r"'images of/é1.png' has more than one row \(rows 2 and 3\)"
LISTS = {"split": "lists", "test_split": "list"}


@pytest.mark.parametrize(("change", "settings", "message"), [
    (lambda f: f.drop(columns="label"), {}, "has no column 'label'; it has: path, domain, split, note; name it"),
    (lambda f: f.assign(domain=["a\nb"] + ["a"] * 23), {}, r"cannot be called 'a\\nb', which has"),
    (lambda f: f.assign(domain=[""] + ["a"] * 23), {}, "row 2: the column 'domain' is empty"),
    (lambda f: f.head(0), {}, "has no rows"),
    (lambda f: f.assign(path=[f"nowhere{index}.png" for index in range(24)]), {},
     r"mine.csv, row 17, column 'path': no file 'nowhere15.png' in .*; 12 of 12 files of 7 are not there; correct"),
    *((lambda f, path=path: f.assign(path=[path, *f["path"][1:]]), {}, TWO)  # row 2 is of another domain than row 3
      for path in ("images of/é1.png", "./images of/é1.png", "images of//é1.png", "images of/x/../é1.png")),
    (lambda f: f.rename(columns={"note": "label"}), {}, "has 2 columns 'label'; remove or rename all but one"),
    (lambda f: f.drop(columns="split"), LISTS, r"has no column 'split', which data.split = 'lists'"),
    (lambda f: f.replace({"split": {"val": "dev"}}), LISTS,
     r"mine.csv: 'dev' in the column 'split' of domain '7' is none of train, val"),
    (lambda f: f.replace({"split": {"test": ""}}), LISTS, r"no row of domain '7' has 'test' in the column 'split'"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(table, change, settings, message):
    data = table(change(ROWS), **settings)
    with pytest.raises(UserError, match=rf"\A.*(?:{message}).*\Z"):
        [load(data, "7") for load in (load_client, load_target)]


@pytest.mark.parametrize(("name", "content", "message"), [
    *(("mine.csv", f"path,label,domain\n{rows}".encode(), "row 2 has more fields than the header, which has 3|saw 4")
      for rows in ("art/0.png,cat,art,\nart/1.png,dog,art,\n", "art/0.png,cat,art\nart/1.png,dog,art,\n",
                   "photo,art/0.png,cat,art\n")),  # a comma in the path
    ("mine.csv", b"\xff\xfe\x00path", "cannot read the table"),
    ("mine.txt", b"path,label,domain\n", r"data.root: .* is no table; name a file that ends in .csv"),
    ("no.csv", None, r"data.root: no file .*/no.csv; name the table's file"),
])  # fmt: skip
def test_files_that_are_no_tables(tmp_path, name, content, message):
    if name and content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        benchmark(DataSettings(dataset="table", root=str(tmp_path / name)))


def test_a_parquet_table_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "mine.parquet").touch()
    with pytest.raises(UserError, match=r"\Aa Parquet table needs pyarrow: pip install '.*parquet\]'\Z"):
        benchmark(DataSettings(dataset="table", root=str(tmp_path / "mine.parquet")))
