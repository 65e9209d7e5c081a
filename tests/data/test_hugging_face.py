"""Hugging Face data sets on disk."""

import shutil

import numpy as np
import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import benchmark, hugging_face, load_client, load_target
from fedsim.data.pixels import read_bytes
from fedsim.data.reader import reader
from fedsim.settings import DataSettings

datasets = pytest.importorskip("datasets")


@pytest.fixture
def saved(tmp_path):
    """Settings of a saved data set: 20 images, two domains, labels by name, one class without images."""
    table = {
        "image": [Image.new("RGB", (8, 8), (10 * index, 0, 0)) for index in range(20)],
        "label": [index % 2 for index in range(20)],
        "place": ["Zürich" if index < 8 else "2" for index in range(20)],
    }
    features = datasets.Features({
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog", "ant"]),
        "place": datasets.Value("string"),
    })  # fmt: skip
    datasets.Dataset.from_dict(table, features=features).save_to_disk(tmp_path / "saved")
    return DataSettings(
        dataset="hugging-face", root=str(tmp_path / "saved"), columns={"domain": "place"}, image_size=8,
        cache=str(tmp_path / "cache"),
    )  # fmt: skip


def test_domains_classes_and_images(saved):
    found = benchmark(saved)
    assert (found.domains, found.classes) == (("2", "Zürich"), ("ant", "cat", "dog"))
    images, labels, _ = load_target(saved, "Zürich")
    assert images[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    assert labels.tolist() == [1, 2] * 4
    assert load_client(saved, "2").class_counts()[0] == 0


def test_images_are_decoded_once(saved, monkeypatch):
    read = reader(saved, benchmark(saved))
    first = np.array(read.images("2")[0])
    monkeypatch.setattr(read, "_decode", None)
    np.testing.assert_array_equal(read.images("2")[0], first)
    assert read.fingerprint("2") != read.fingerprint("Zürich")
    assert read.sizes("2").tolist() == [[8, 8]] * 12


def test_what_is_wrong_is_one_line(saved, tmp_path):
    with pytest.raises(UserError, match=r"has no column 'domain'; .*place.*data.columns.domain"):
        benchmark(saved.model_copy(update={"columns": {}}))
    with pytest.raises(UserError, match="no data set that `save_to_disk` wrote"):
        benchmark(saved.model_copy(update={"root": str(tmp_path)}))


def save(tmp_path, labels, domains, images=None, names=None):
    """Settings of a saved data set with these columns; `names` makes the labels a ClassLabel."""
    images = images or [Image.new("RGB", (8, 8), (10 * index, 0, 0)) for index in range(len(labels))]
    table = {"image": images, "label": labels, "domain": domains}
    features = None
    if names:
        label = datasets.ClassLabel(names=names)
        features = datasets.Features(image=datasets.Image(), label=label, domain=datasets.Value("string"))
    datasets.Dataset.from_dict(table, features=features).save_to_disk(tmp_path / "other")
    folders = {"root": str(tmp_path / "other"), "cache": str(tmp_path / "cache")}
    return DataSettings(dataset="hugging-face", image_size=8, **folders)


@pytest.mark.parametrize(
    ("labels", "domains", "names", "said"),
    [
        ([0, 1, -1, 1], "aabb", ["cat", "dog"], "row 2: -1 in the column 'label' is none of the 2 named classes"),
        ([0, 1, None, 1], "aabb", ["cat", "dog"], "row 2: the column 'label' is empty"),
        (["cat", "dog", None, "dog"], "aabb", None, "row 2: the column 'label' is empty"),
        (["cat", "dog", "", "dog"], "aabb", None, "row 2: the column 'label' is empty"),
        ([0.0, 1.0, 0.0, float("nan")], "aabb", None, "row 3: the column 'label' is empty"),
        ([["cat"], ["dog"], ["cat"], ["dog"]], "aabb", None, "row 0: the column 'label' holds several values"),
        (["cat", "dog", "cat", "dog"], ["a", "a", None, "b"], None, "row 2: the column 'domain' is empty"),
    ],
)
def test_rows_without_a_label_or_domain_are_refused(tmp_path, labels, domains, names, said):
    data = save(tmp_path, labels, list(domains), names=names)
    with pytest.raises(UserError, match=f"{said}.*; correct or remove the row") as error:
        load_target(data, "b")
    assert "\n" not in str(error.value)


def test_a_row_without_an_image_is_refused(tmp_path):
    images = [Image.new("RGB", (8, 8)) for _ in range(3)] + [None]
    data = save(tmp_path, [0, 1, 0, 1], list("aabb"), images, ["cat", "dog"])
    with pytest.raises(UserError, match=r"row 3: there is no image in the column 'image'"):
        load_target(data, "b")


def test_files_that_a_column_of_paths_names_belong_to_the_content(tmp_path, monkeypatch):
    """Other pixels in the same files are other data, in the fingerprint and in the cache."""
    files = [tmp_path / f"{index}.png" for index in range(4)]
    for file in files:
        Image.new("RGB", (8, 8), (1, 2, 3)).save(file)
    data = save(tmp_path, ["cat", "dog"] * 2, list("aabb"), [str(file) for file in files])
    read = reader(data, benchmark(data))
    before, images = read.fingerprint("b"), np.array(read.images("b")[0])
    opened = []
    monkeypatch.setattr(hugging_face, "read_bytes", lambda file: opened.append(file) or read_bytes(file))
    for function in vars(
        hugging_face
    ).values():  # a new process has nothing in memory; a site may start one per message
        getattr(function, "cache_clear", int)()
    assert reader(data, benchmark(data)).fingerprint("b") == before
    assert opened == []
    Image.new("RGB", (8, 8), (3, 2, 1)).save(files[3])
    assert read.fingerprint("b") != before
    assert read.images("b")[0][:, 0, 0, 0].tolist() == [1, 3] != images[:, 0, 0, 0].tolist()


def test_a_set_that_is_saved_anew_is_read_anew(tmp_path):
    """A process that has opened it before sees the new images, labels and domains."""
    before = save(tmp_path, ["cat", "dog"] * 2, list("aabb"))
    first = reader(before, benchmark(before)).fingerprint("b")
    shutil.rmtree(before.root)
    images = [Image.new("RGB", (8, 8), (9, 9, 9))] * 6
    data = save(tmp_path, ["ant", "dog", "cat"] * 2, list("aaabbb"), images)
    assert (data.root, benchmark(data).classes) == (before.root, ("ant", "cat", "dog"))
    read = reader(data, benchmark(data))
    assert read.fingerprint("b") != first
    assert read.images("b")[0][:, 0, 0, 0].tolist() == [9, 9, 9]
