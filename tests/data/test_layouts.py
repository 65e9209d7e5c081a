"""Data sets by name, whose published layouts are not those of a plain tree."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from published_trees import camelyon17, digits_dg, fed_isic2019, image

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS, benchmark, check_partitions, find_data, load_client, load_target
from fedsim.data.fingerprint import fingerprint
from fedsim.data.loading import split_of_domain
from fedsim.data.reader import reader
from fedsim.settings import DataSettings

SIDE = 16


TREES: dict[str, tuple[str, Callable[[Path], None] | None]] = {
    "pacs": ("PACS", None), "domainnet": ("DomainNet", None), "office-caltech-home": ("OfficeCaltechHome", None),
    "digits-dg": ("digits_dg", digits_dg), "camelyon17": ("camelyon17_v1.0", camelyon17),
    "fed-isic2019": ("fed_isic2019", fed_isic2019), "rotated-mnist": ("MNIST", None),
}  # fmt: skip


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Function (data set, tree or its maker) -> settings; the row's counts are removed, because trees are small."""

    def make(name, tree=True, **more):
        folder, made = TREES[name]
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], counts=None, class_counts=None))
        if tree:
            root = tmp_path / "data" / folder
            root.mkdir(parents=True)
            made(root)
        places = {"root": str(tmp_path / "data"), "cache": str(tmp_path / "c")}
        return DataSettings(**{"dataset": name, "image_size": SIDE, **places, **more})

    return make


@pytest.mark.parametrize("name", TREES)
def test_files_that_are_not_there_are_missed_before_anything_is_read(name, tmp_path, settings):
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "data"))):
        find_data(settings(name, False, domains=["clipart", "real"] if name == "domainnet" else []))


def labels(data, domain):
    return np.bincount(load_target(data, domain)[1], minlength=len(benchmark(data).classes)).tolist()


def test_domainnet(tmp_path, settings):
    """Classes are the folders' names; the published lists give the splits."""
    root = tmp_path / "data" / "DomainNet"
    for index in range(345):
        (root / "real" / f"thing_{index:03d}").mkdir(parents=True)
        image(root / "clipart" / f"thing_{index:03d}" / f"clipart_{index:03d}_000001.png", index, 4)
    names = [f"clipart/thing_{index:03d}/clipart_{index:03d}_000001.png {index}\n" for index in range(345)]
    (root / "clipart_train.txt").write_text("".join(names[:300]))
    (root / "clipart_test.txt").write_text("".join(names[300:]))
    own = {"split": "lists", "test_split": "list", "lists": ".", "image_size": 8}
    data = settings("domainnet", False, domains=["clipart", "real"], **own)
    assert benchmark(data).classes[344] == "thing_344"
    with pytest.raises(UserError, match=r"no list clipart_test\*\.txt"):
        load_target(data, "clipart")
    data = data.model_copy(update={"root": str(root)})
    _, found, tested = load_target(data, "clipart")
    assert (found.tolist(), tested.tolist()) == (list(range(345)), list(range(300, 345)))
    client = load_client(data, "clipart")
    assert sorted([*client.train, *client.validation]) == [*range(300)]
    (root / "clipart" / "one_more").mkdir()
    with pytest.raises(UserError, match=r"346 class folders in .*, and the data set has 345"):
        benchmark(data)


def test_digits_dg(tmp_path, settings):
    data = settings("digits-dg", split="lists")
    assert labels(data, "svhn") == [3] * 10
    client = load_client(data, "mnist_m")
    assert (len(client.train), len(client.validation)) == (20, 10)
    (tmp_path / "data" / "digits_dg" / "syn" / "val").rename(tmp_path / "wal")
    with pytest.raises(UserError, match=r"no folder .*val; unpack the archive again"):
        load_target(data, "syn")


def test_office_caltech_home(tmp_path, settings):
    """Both data sets' spellings of a class are one class; a class that only one of them has is left out."""
    root = tmp_path / "data" / "OfficeCaltechHome"
    both = ("bike", "calculator", "keyboard", "monitor", "mouse", "mug")
    caltech = ("back_pack", "headphones", "laptop_computer", *both)
    home = ("Backpack", "Laptop", "Toothbrush", "Alarm_Clock", *map(str.title, both))
    for domain in ("amazon", "caltech", "webcam", "Art", "Clipart", "Product", "Real World"):
        for name in caltech if domain.islower() else home:
            for number in range(1 + (domain == "Real World")):
                image(root / domain / name / f"{number}.jpg")
    data = settings("office-caltech-home", False)
    assert labels(data, "webcam") == labels(data, "Art") == [1] * 8
    assert labels(data, "Real_World") == [2] * 8
    (root / "caltech" / "mug").rename(root / "caltech" / "coffee-mug")
    with pytest.raises(UserError, match=r"caltech has no folder of class 'mug'; .* coffee-mug, headphones; rename"):
        labels(data, "caltech")


def test_camelyon17(tmp_path, settings):
    data = settings("camelyon17")
    images, found, _ = load_target(data, "hospital_3")
    assert found.tolist() == [0] * 6 + [1] * 6
    assert images[:, 0, 0, 0].tolist() == [0] * 6 + [255] * 6
    (tmp_path / "data" / "camelyon17_v1.0" / "metadata.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"is not WILDS's metadata"):
        load_target(data, "hospital_3")


def test_camelyon17_has_patients(tmp_path, settings):
    """Once two patches each are of one patient, a hospital has six patients, one of which validates."""
    data = settings("camelyon17")
    file = tmp_path / "data" / "camelyon17_v1.0" / "metadata.csv"
    assert reader(data, benchmark(data)).findings() == []  # nobody has two patches
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines[1:]):
        index, _, others = line.split(",", 2)
        lines[number + 1] = f"{index},{number // 2:03d},{others}"
    file.write_text("\n".join(lines) + "\n")
    [remark] = reader(data, benchmark(data)).findings()
    assert remark.line.startswith("the images are of 30 patients and are drawn one by one")
    data = data.model_copy(update={"group": "patient"})
    read = reader(data, benchmark(data))
    groups = read.groups("hospital_3")
    assert sorted(groups.tolist()) == sorted([*range(6)] * 2)
    assert read.findings() == []
    train, validation = split_of_domain(read, "hospital_3", read.labels("hospital_3"))
    assert (len(train), len(validation)) == (10, 2)
    assert not set(groups[train]) & set(groups[validation])
    with pytest.raises(UserError, match=r"Camelyon17.* has no groups that data.group = 'folder' could name"):
        check_partitions(data.model_copy(update={"group": "folder"}), "hospital_3")


@pytest.mark.parametrize(
    ("name", "file", "domain", "old", "new"),
    [
        ("camelyon17", "metadata.csv", "hospital_0", "0,000,0,0,64,0,0,0,0", "0,000,0,0,64,0,0,0,1"),
        ("fed-isic2019", "train_test_split", "center_0", "ISIC_0000001,1,0,train", "ISIC_0000001,1,0,test"),
    ],
)
def test_a_published_split_is_part_of_the_fingerprint_where_it_is_used(
    tmp_path, settings, name, file, domain, old, new
):
    data = settings(name)
    lists = data.model_copy(update={"split": "lists"})
    before = [fingerprint(each, domain)["content"] for each in (data, lists)]
    path = tmp_path / "data" / TREES[name][0] / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(1, 1))
    after = [fingerprint(each, domain)["content"] for each in (data, lists)]
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_fed_isic2019(settings):
    data = settings("fed-isic2019", test_split="list")
    _, found, tested = load_target(data, "center_1")  # 16, 24, 17, 25, ...; 24, 18, 27, 21, 30 are tested
    assert found.tolist() == sorted(2 * [*range(8)])
    assert tested.tolist() == [1, 4, 7, 10, 13]
    assert reader(data, benchmark(data)).listed("center_1", "train").tolist() == sorted({*range(16)} - {*tested})
