"""Data sets by name: each read from a small tree in its published layout."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS, benchmark, load_client, load_target
from fedsim.data.reader import reader
from fedsim.settings import DataSettings


def image(path: Path, red: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (red, 0, 0)).save(path)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Function (data set) -> settings. The row's counts are removed, because the trees here are small."""

    def make(name, **more):
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], counts=None))
        return DataSettings(dataset=name, root=str(tmp_path / "data"), image_size=8, cache=str(tmp_path / "c"), **more)

    return make


def labels(data, domain):
    return np.bincount(load_target(data, domain)[1], minlength=len(benchmark(data).classes)).tolist()


def test_domainnet(tmp_path, settings):
    """Classes are the folders' names; the published lists give the splits."""
    root = tmp_path / "data" / "DomainNet"
    for domain in ("clipart", "real"):
        for index in range(345):
            image(root / domain / f"thing_{index:03d}" / f"{domain}_{index:03d}_000001.png", index % 256)
    names = [f"clipart/thing_{index:03d}/clipart_{index:03d}_000001.png" for index in range(345)]
    for part, kept in (("train", names[:300]), ("test", names[300:])):
        text = "".join(f"{name} {int(name.split('_')[1][:3])}\n" for name in kept)
        (root / f"clipart_{part}.txt").write_text(text)
    data = settings("domainnet", domains=["clipart", "real"])
    assert benchmark(data).classes[344] == "thing_344"
    assert labels(data, "real") == [1] * 345
    assert "data.root is then the DomainNet folder itself" in BENCHMARKS["domainnet"].note
    split = data.model_copy(update={"split": "lists", "test_split": "list", "lists": "."})
    with pytest.raises(UserError, match=r"no list clipart_test\*\.txt"):
        load_target(split, "clipart")
    split = split.model_copy(update={"root": str(root)})
    assert load_target(split, "clipart")[2].tolist() == list(range(300, 345))
    assert sorted([*load_client(split, "clipart").train, *load_client(split, "clipart").validation]) == [*range(300)]
    (root / "clipart" / "one_more").mkdir()
    with pytest.raises(UserError, match=r"346 class folders in .*, and the data set has 345"):
        benchmark(data)


def test_digits_dg(tmp_path, settings):
    root = tmp_path / "data" / "digits_dg"
    for domain in ("mnist", "mnist_m", "svhn", "syn"):
        for part, count in (("train", 4), ("val", 1)):
            for digit in range(10):
                for number in range(count):
                    image(root / domain / part / str(digit) / f"{part}{number}.jpg")
    data = settings("digits-dg", split="lists")
    assert labels(data, "svhn") == [5] * 10
    client = load_client(data, "mnist_m")
    assert (len(client.train), len(client.validation)) == (40, 10)
    (root / "syn" / "val").rename(root / "syn" / "wal")
    with pytest.raises(UserError, match=r"no folder .*val; unpack the archive again"):
        load_target(data, "syn")


def test_office_caltech_10(tmp_path, settings):
    root = tmp_path / "data" / "office_caltech_10"
    for domain in ("amazon", "caltech", "dslr", "webcam"):
        for name in BENCHMARKS["office-caltech-10"].classes:
            image(root / domain / name / "frame_0001.jpg")
    assert labels(settings("office-caltech-10"), "dslr") == [1] * 10


def test_office_caltech_home(tmp_path, settings):
    """Both data sets' spellings of a class are one class; a class that only one of them has is left out."""
    root = tmp_path / "data" / "OfficeCaltechHome"
    caltech = (
        "back_pack",
        "bike",
        "calculator",
        "headphones",
        "keyboard",
        "laptop_computer",
        "monitor",
        "mouse",
        "mug",
    )
    home = (
        "Backpack",
        "Bike",
        "Calculator",
        "Keyboard",
        "Laptop",
        "Monitor",
        "Mouse",
        "Mug",
        "Toothbrush",
        "Alarm_Clock",
    )
    for domains, names in ((("amazon", "caltech", "webcam"), caltech), (("Art", "Clipart", "Product"), home)):
        for domain in domains:
            for name in names:
                image(root / domain / name / "00001.jpg")
    for name in home:
        image(root / "Real World" / name / "00001.jpg")
        image(root / "Real World" / name / "00002.jpg")
    data = settings("office-caltech-home")
    assert labels(data, "webcam") == labels(data, "Art") == [1] * 8
    assert labels(data, "Real_World") == [2] * 8
    (root / "caltech" / "mug").rename(root / "caltech" / "coffee-mug")
    with pytest.raises(UserError, match=r"caltech has no folder of class 'mug'; .* coffee-mug, headphones; rename"):
        labels(data, "caltech")


def test_camelyon17(tmp_path, settings):
    root = tmp_path / "data" / "camelyon17_v1.0"
    rows = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for index in range(20):
        patient, node, tumor, center = f"{index:03d}", index % 5, index % 2, index // 4
        slide = f"patient_{patient}_node_{node}"
        image(root / "patches" / slide / f"patch_{slide}_x_{32 * index}_y_64.png", 255 * tumor)
        rows.append(f"{index},{patient},{node},{32 * index},64,{tumor},{index},{center},0")
    (root / "metadata.csv").write_text("\n".join(rows) + "\n")
    data = settings("camelyon17")
    images, found, _ = load_target(data, "hospital_3")
    assert found.tolist() == [0, 0, 1, 1]
    assert images[:, 0, 0, 0].tolist() == [0, 0, 255, 255]
    (root / "metadata.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"is not WILDS's metadata"):
        load_target(data, "hospital_3")


def test_fed_isic2019(tmp_path, settings):
    root = tmp_path / "data" / "fed_isic2019"
    rows = ["image,target,center,fold,fold2"]
    for index in range(24):
        image(root / "ISIC_2019_Training_Input_preprocessed" / f"ISIC_{index:07d}.jpg")
        rows.append(f"ISIC_{index:07d},{index % 8},{index // 8},{'train' if index % 2 else 'test'},x")
    (root / "train_test_split").write_text("\n".join(rows) + "\n")
    data = settings("fed-isic2019", domains=["center_0", "center_1"], test_split="list")
    _, found, tested = load_target(data, "center_1")
    assert found.tolist() == list(range(8))
    assert found[tested].tolist() == [0, 2, 4, 6]
    assert reader(data, benchmark(data)).listed("center_1", "train").tolist() == [1, 3, 5, 7]


def test_an_incomplete_copy_is_refused(tmp_path):
    image(tmp_path / "digitsdg" / "mnist" / "train" / "0" / "a.jpg")
    (tmp_path / "digitsdg" / "mnist" / "val").mkdir()
    data = DataSettings(dataset="digits-dg", root=str(tmp_path), cache=str(tmp_path / "c"))
    with pytest.raises(UserError, match=r"Digits-DG mnist is incomplete in .*: 1 of 6,000 images"):
        load_target(data, "mnist")
    with pytest.raises(UserError, match=r"Camelyon17: no 'metadata.csv' in"):
        load_target(DataSettings(dataset="camelyon17", root=str(tmp_path)), "hospital_0")
