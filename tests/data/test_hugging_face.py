"""Hugging Face data sets on disk, and names that are written in two ways in them or in a table."""

import numpy as np
import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import benchmark, hugging_face, load_client, load_target
from fedsim.data.pixels import read_bytes
from fedsim.data.reader import reader
from fedsim.runs.notes import data_notes
from fedsim.settings import DataSettings

datasets = pytest.importorskip("datasets")


def save(tmp_path, labels, domains, images=None, names=None, domain="domain"):
    """Settings of a saved data set with these columns; `names` makes the labels a ClassLabel."""
    images = images or [Image.new("RGB", (8, 8), (10 * index, 0, 0)) for index in range(len(labels))]
    features = names and datasets.Features({
        "image": datasets.Image(), "label": datasets.ClassLabel(names=names), domain: datasets.Value("string"),
    })  # fmt: skip
    table = {"image": images, "label": labels, domain: list(domains)}
    datasets.Dataset.from_dict(table, features=features).save_to_disk(tmp_path / "saved")
    columns = {} if domain == "domain" else {"domain": domain}
    folders = {"root": str(tmp_path / "saved"), "cache": str(tmp_path / "cache")}
    return DataSettings(dataset="hugging-face", image_size=8, columns=columns, **folders)


def test_domains_classes_and_images(tmp_path, monkeypatch):
    """Labels by name, a column of another name, a class without images; images are decoded once."""
    domains = ["Zürich" if index < 8 else "2" for index in range(20)]
    saved = save(tmp_path, [0, 1] * 10, domains, names=["cat", "dog", "ant"], domain="place")
    found = benchmark(saved)
    assert (found.domains, found.classes) == (("2", "Zürich"), ("ant", "cat", "dog"))
    images, labels, _ = load_target(saved, "Zürich")
    assert (images[:, 0, 0, 0].tolist(), labels.tolist()) == ([0, 10, 20, 30, 40, 50, 60, 70], [1, 2] * 4)
    assert load_client(saved, "2").class_counts()[0] == 0
    read = reader(saved, found)
    assert read.fingerprint("2") != read.fingerprint("Zürich")
    assert read.sizes("2").tolist() == [[8, 8]] * 12
    monkeypatch.setattr(read, "_cells", None)
    np.testing.assert_array_equal(read.images("Zürich")[0], images)
    for changes, said in (
        ({"columns": {}}, r"has no column 'domain'; .*place.*data.columns.domain"),
        ({"root": str(tmp_path)}, "no data set that `save_to_disk` wrote"),
        ({"columns": {"domain": "place", "split": "fold"}}, "no column 'split' is read of this data set"),
        ({"columns": {"domain": "place", "lable": "kind"}}, "no column 'lable' .*did you mean 'label'"),
    ):
        with pytest.raises(UserError, match=said):
            benchmark(saved.model_copy(update=changes))


@pytest.mark.parametrize(("labels", "domains", "names", "said"), [
    ([0, 1, -1, 1], "aabb", ["cat", "dog"], "row 2: -1 in the column 'label' is none of the 2 named classes"),
    ([0, 1, None, 1], "aabb", ["cat", "dog"], "row 2: the column 'label' is empty"),
    (["cat", "dog", None, "dog"], "aabb", None, "row 2: the column 'label' is empty"),
    ([["cat"], ["dog"], ["cat"], ["dog"]], "aabb", None, "row 0: the column 'label' holds several values"),
    (["cat", "dog", "cat", "dog"], ["a", "a", None, "b"], None, "row 2: the column 'domain' is empty"),
    ([0, 1, 0, 1], "aabb", "no image", "row 3: there is no image in the column 'image'"),
])  # fmt: skip
def test_rows_without_a_label_domain_or_image_are_refused(tmp_path, labels, domains, names, said):
    images = [Image.new("RGB", (8, 8))] * 3 + [None] if names == "no image" else None
    data = save(tmp_path, labels, domains, images, ["cat", "dog"] if images else names)
    with pytest.raises(UserError, match=said):
        load_target(data, "b")


def test_two_columns_of_images_or_domains_are_not_the_same_content(tmp_path):
    """The images of the first column came out of the cache for the second one; a domain 'a' has the same labels."""
    reds = np.arange(0, 80, 10)
    front, back = ([Image.new("RGB", (8, 8), (int(red) + more, 0, 0)) for red in reds] for more in (0, 5))
    table = {"image": front, "back": back, "label": ["cat", "dog"] * 4, "domain": list("aaaabbbb")}
    table["site"] = list("bbbbaaaa")
    datasets.Dataset.from_dict(table).save_to_disk(tmp_path / "saved")
    shown, prints = [], set()
    for columns in ({}, {"path": "back"}, {"domain": "site"}):
        folders = {"root": str(tmp_path / "saved"), "cache": str(tmp_path / "cache")}
        data = DataSettings(dataset="hugging-face", image_size=8, columns=columns, **folders)
        read = reader(data, benchmark(data))
        shown.append(read.images("a")[0][:, 0, 0, 0].tolist())
        prints.add(read.fingerprint("a"))
    assert shown == [[0, 10, 20, 30], [5, 15, 25, 35], [40, 50, 60, 70]]
    assert len(prints) == 3


def test_files_that_a_column_of_paths_names_belong_to_the_content(tmp_path, monkeypatch):
    files = [tmp_path / f"{index}.png" for index in range(4)]
    for file in files:
        Image.new("RGB", (8, 8), (1, 2, 3)).save(file)
    data = save(tmp_path, ["cat", "dog"] * 2, "aabb", [str(file) for file in files])
    read = reader(data, benchmark(data))
    before, images = read.fingerprint("b"), np.array(read.images("b")[0])
    opened = []
    monkeypatch.setattr(hugging_face, "read_bytes", lambda file: opened.append(file) or read_bytes(file))
    for function in vars(hugging_face).values():  # as in a new process, of which a site may start one per message
        getattr(function, "cache_clear", int)()
    assert reader(data, benchmark(data)).fingerprint("b") == before
    assert opened == []
    Image.new("RGB", (8, 8), (3, 2, 1)).save(files[3])
    assert read.fingerprint("b") != before
    assert read.images("b")[0][:, 0, 0, 0].tolist() == [1, 3] != images[:, 0, 0, 0].tolist()


def test_own_splits_are_joined_with_a_word_or_used_where_they_are_asked_for(tmp_path):
    saved = save(tmp_path, ["cat", "dog"] * 2, "aabb")
    asked = saved.model_copy(update={"split": "lists", "test_split": "list"})
    with pytest.raises(UserError, match=r"one Dataset without splits.*save a DatasetDict"):
        load_client(asked, "a")
    rows = datasets.load_from_disk(saved.root)
    datasets.DatasetDict({"train": rows, "valid": rows}).save_to_disk(tmp_path / "parts")
    joined, asked = (one.model_copy(update={"root": str(tmp_path / "parts")}) for one in (saved, asked))
    (said,) = data_notes(benchmark(joined), {}, [], "a", [])
    assert said.startswith("the data set's own splits train (4 images), valid (4 images)")
    assert data_notes(benchmark(asked), {}, [], "a", []) == []
    own = load_client(asked, "a")
    assert (len(own.train), len(own.validation), len(load_target(joined, "b")[2])) == (2, 2, 4)
    with pytest.raises(UserError, match=r"'b' has no image in a split named 'test'; its splits are train, valid"):
        load_target(asked, "b")


def test_names_in_two_spellings(tmp_path):
    """Labels that a domain has side by side are two classes, as capital and small letters are in handwriting."""
    with pytest.raises(UserError, match=r"the labels 'Cat' and 'cat' differ in spelling only; make them equal"):
        benchmark(save(tmp_path, ["cat", "dog", "Cat", "dog"], ["a", "a", "b", "b"]))
    found = benchmark(save(tmp_path / "2", ["A", "a", "a", "1_0", "10"], ["x", "x", "y", "y", "y"]))
    assert found.classes == ("10", "1_0", "A", "a")
    data = save(tmp_path / "3", ["ant", "dog", "cat"], ["Site A", "site_a", "b"])
    with pytest.raises(UserError, match="the domains 'Site A' and 'site_a' differ in spelling only"):
        benchmark(data)
    found = benchmark(data.model_copy(update={"domains": ["b", "site_a"]}))
    assert (found.domains, found.classes) == (("b", "site_a"), ("cat", "dog"))  # no class of a domain that is left out


def test_the_cache_is_whole_or_not_there(tmp_path, monkeypatch):
    """A damaged file is made anew; neither a bad image nor a full disk leaves anything else, and each is one line."""
    saved = save(tmp_path, ["cat", "dog"] * 6, "aaaaaabbbbbb")
    images = load_target(saved, "a")[0].tolist()
    kept = sorted((tmp_path / "cache" / "huggingface").iterdir())
    for damage in (lambda content: content[: len(content) // 2], lambda content: b""):
        for file in kept:
            file.write_bytes(damage(file.read_bytes()))
        read = reader(saved, benchmark(saved))
        assert read.images("a")[0].tolist() == images
        assert read.sizes("a").tolist() == [[8, 8]] * 6
        assert len(read.digests("a")) == 6

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UserError, match=r"cannot write the image cache .*No space left"):
        load_target(saved, "b")
    monkeypatch.undo()
    saved = save(tmp_path, ["cat", "dog"] * 6, "aaaaaabbbbbb", [b"no image"] * 12)
    with pytest.raises(UserError, match="not an image that Pillow knows"):
        load_target(saved, "b")
    assert not list((tmp_path / "cache" / "huggingface").glob(".tmp-*"))
