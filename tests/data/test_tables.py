"""Tables of images: CSV, TSV and Parquet, with any order, spelling and size."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from support import run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.data import benchmark, load_client, load_target
from fedsim.data.fingerprint import fingerprints
from fedsim.data.reader import reader
from fedsim.settings import DataSettings


@pytest.fixture
def table(tmp_path):
    """Function (suffix, **changes) -> settings of a table of 24 images: two domains, three classes; "vélo" in one."""
    rows = []
    for index in range(24):
        domain, label = ("Été 2", "7")[index % 2], ("cat", "dog", "vélo")[index % 3]
        if domain == "7" and label == "vélo":
            label = "dog"  # a class that is absent in a domain
        path = f"images of/é{index}.png"
        (tmp_path / "images of").mkdir(exist_ok=True)
        Image.new("RGB", (9, 7), (10 * index, 0, 0)).save(tmp_path / path)
        split = ("train", "val", "test")[index // 2 % 3]
        rows.append({"path": path, "label": label, "domain": domain, "split": split, "note": "a, b"})

    def make(suffix=".csv", frame=None, **settings):
        frame = pd.DataFrame(rows) if frame is None else frame
        file = tmp_path / f"mine{suffix}"
        if suffix == ".parquet":
            frame.to_parquet(file)
        else:
            frame.to_csv(file, index=False, sep="\t" if suffix == ".tsv" else ",", encoding="utf-8-sig")
        return DataSettings(dataset="table", root=str(file), image_size=8, cache=str(tmp_path / "cache"), **settings)

    make.rows = rows
    return make


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_table_gives_domains_classes_and_images(table, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    data = table(suffix)
    found = benchmark(data)
    assert (found.domains, found.classes) == (("7", "Été 2"), ("cat", "dog", "vélo"))
    images, labels, indices = load_target(data, "Été 2")
    assert images.shape == (12, 3, 8, 8)
    expected = sorted((row["label"], row["path"]) for row in table.rows if row["domain"] == "Été 2")
    assert [found.classes[label] for label in labels] == [label for label, _ in expected]
    reds = [10 * int(path.removeprefix("images of/é").removesuffix(".png")) for _, path in expected]
    np.testing.assert_array_equal(images[:, 0, 0, 0], reds)
    assert len(indices) == 12


@pytest.mark.parametrize("rows", [
    "art/0.png,cat,art,\nart/1.png,dog,art,\n",
    "art/0.png,cat,art\nart/1.png,dog,art,\n",
    "photo,art/0.png,cat,art\n",  # a comma in the path
])  # fmt: skip
def test_a_row_with_more_fields_than_the_header_is_refused(tmp_path, rows):
    """Its fields would be read as those of other columns."""
    (tmp_path / "mine.csv").write_text("path,label,domain\n" + rows)
    with pytest.raises(UserError, match=r"row 2 has more fields than the header, which has 3\)|line 3, saw 4"):
        benchmark(DataSettings(dataset="table", root=str(tmp_path / "mine.csv")))


def test_a_class_may_be_absent_in_a_domain(table):
    data = table()
    client = load_client(data, "7")
    assert client.class_counts()[2] == 0
    assert len(client.class_counts()) == 3


def test_the_order_of_the_rows_changes_nothing(table):
    first = load_target(table(), "7")
    shuffled = pd.DataFrame(table.rows).sample(frac=1, random_state=1)
    for one, other in zip(first, load_target(table(frame=shuffled), "7")):
        np.testing.assert_array_equal(one, other)


def test_labels_without_paths_are_the_labels_of_the_images(table):
    data = table()
    read = reader(data, benchmark(data))
    for domain in read.found.domains:
        np.testing.assert_array_equal(read.labels(domain), read.images(domain)[1])


def test_other_names_of_columns(table):
    frame = pd.DataFrame(table.rows).rename(columns={"path": "file", "domain": "site"})
    data = table(frame=frame, columns={"path": "file", "domain": "site"})
    assert benchmark(data).domains == ("7", "Été 2")


def test_the_split_column(table):
    """The table says which images are train, val and test; the unseen domain is tested on its test rows."""
    data = table(split="lists", test_split="list")
    client = load_client(data, "Été 2")
    assert (len(client.train), len(client.validation)) == (4, 4)
    assert len(load_target(data, "Été 2")[2]) == 4
    assert not set(client.train) & set(load_target(data, "Été 2")[2])
    without = pd.DataFrame(table.rows).drop(columns="split")
    with pytest.raises(UserError, match=r"has no column 'split', which data.split = 'lists'"):
        load_client(table(frame=without, split="lists"), "7")


def test_a_run_reads_the_split_column(table, tmp_path):
    """The column is part of the fingerprint, because it says who trains."""
    data = table(split="lists", test_split="list").model_dump() | {"image_size": 28}
    experiment = small_experiment(tmp_path / "out", data={**data, "domains": [], "fraction": 1}, train={"rounds": 1},
                                  run={"target": "7"})  # fmt: skip
    folder, _ = run_small(experiment)
    assert pd.read_csv(folder / "summary.csv").loc[0, "target_images"] == 4
    before = fingerprints(experiment.data)
    other = pd.DataFrame(table.rows).replace({"split": {"val": "test", "test": "val"}})
    assert fingerprints(table(frame=other, split="lists", test_split="list"))["7"] != before["7"]
    again = table(frame=pd.DataFrame(table.rows), split="lists", test_split="list")
    assert fingerprints(again) == fingerprints(again.model_copy(update={"image_size": 9})) == before


def test_words_of_the_split_column(table):
    """An unknown word is refused where the column is read; an empty cell is an image that is not used."""
    frame = pd.DataFrame(table.rows)
    dev = frame.replace({"split": {"val": "dev"}})
    with pytest.raises(UserError, match=r"mine.csv: 'dev' in the column 'split' of domain '7' is none of train, val"):
        load_client(table(frame=dev, split="lists"), "7")
    assert len(load_client(table(frame=dev), "7").labels) == 12
    unused = frame.replace({"split": {"val": ""}})
    assert len(load_client(table(frame=unused, split="lists", holdout=0.25), "7").train) == 3
    without = frame.replace({"split": {"test": ""}})
    with pytest.raises(UserError, match=r"no row of domain '7' has 'test' in the column 'split'"):
        load_target(table(frame=without, split="lists", test_split="list"), "7")


def test_an_image_of_two_domains_is_refused(table):
    frame = pd.DataFrame(table.rows)
    frame.loc[1, "path"] = frame.loc[0, "path"]
    with pytest.raises(UserError, match=r"'images of/é0.png' has more than one row \(rows 2 and 3\)"):
        load_client(table(frame=frame), "7")


@pytest.mark.parametrize(("change", "message"), [
    (lambda frame: frame.drop(columns="label"), "has no column 'label'; it has: path, domain, split, note; name it"),
    (lambda frame: frame.assign(label="cat"), "1 class"),
    (lambda frame: frame.assign(domain=[""] + ["a"] * 23), "row 2: the column 'domain' is empty"),
    (lambda frame: pd.concat([frame, frame.tail(1)]),
     r"'images of/é23.png' has more than one row \(rows 25 and 26\); keep one"),
    (lambda frame: frame.head(0), "has no rows"),
    (lambda frame: frame.assign(path=[f"nowhere{index}.png" for index in range(24)]), r"cannot read .*nowhere\d+\.png"),
    (lambda frame: frame.assign(path=["./images of/é1.png", *frame["path"][1:]]),
     r"'images of/é1.png' has more than one row \(rows 2 and 3\)"),
    (lambda frame: frame.assign(path=["images of//é1.png", *frame["path"][1:]]), r"rows 2 and 3"),
    (lambda frame: frame.assign(path=["images of/x/../é1.png", *frame["path"][1:]]), r"rows 2 and 3"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(table, change, message):
    with pytest.raises(UserError, match=message) as raised:
        load_target(table(frame=change(pd.DataFrame(table.rows))), "7")
    assert "\n" not in str(raised.value)


def test_no_table_is_said_in_one_line(tmp_path):
    (tmp_path / "mine.txt").write_text("path,label,domain\n")
    for root in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(UserError, match=r"data.root: .* is no table; name a file that ends in .csv"):
            benchmark(DataSettings(dataset="table", root=str(root)))
    with pytest.raises(UserError, match=rf"data.root: no file {tmp_path}/no.csv; name the table's file"):
        benchmark(DataSettings(dataset="table", root=str(tmp_path / "no.csv")))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00path")
    with pytest.raises(UserError, match="cannot read the table"):
        benchmark(DataSettings(dataset="table", root=str(tmp_path / "bytes.csv")))


@pytest.mark.parametrize(("form", "root"), [("table", "no.csv"), ("folder", "no"), ("masks", "no"), ("pacs", "no")])
def test_what_is_absent_is_said_with_the_folder_in_which_it_was_looked_for(tmp_path, monkeypatch, form, root):
    monkeypatch.chdir(tmp_path)
    data = DataSettings(dataset=form, root=root, image_size=8, structures={"cup": [1]})
    with pytest.raises(UserError, match=rf" {root} in {tmp_path}, the folder in which fedsim was started") as raised:
        load_target(data, "photo")
    assert "ends in" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_long_table_is_read_in_pieces(table, monkeypatch):
    """The results do not depend on how many rows are read at a time."""
    whole = load_target(table(), "7")[1]
    monkeypatch.setattr("fedsim.data.tables.PIECE", 5)
    shifted = table(frame=pd.DataFrame(table.rows).iloc[::-1])  # another version of the file: nothing is remembered
    np.testing.assert_array_equal(load_target(shifted, "7")[1], whole)
