"""Data sets by name: each read from a small tree in its published layout, and a run of one round on each."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import numbers

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS, benchmark, client_names, find_data, load_client, load_target
from fedsim.data.reader import reader
from fedsim.runtime.launch import launch
from fedsim.settings import DataSettings
from fedsim.settings.experiment import read_experiment

SIDE = 16
TWO_DOMAINS = {"domainnet": ["clipart", "real"], "domainnet-mini": ["clipart", "real"]}  # hundreds of classes


def image(path: Path, seed: int = 0, side: int = SIDE, red: int = 0) -> None:
    """An image of this red, with noise in the other colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    pixels[:, :, 0] = red
    Image.fromarray(pixels).save(path)


def classes_tree(root: Path, name: str) -> None:
    for place, domain in enumerate(TWO_DOMAINS.get(name, BENCHMARKS[name].domains)):
        for label, class_ in enumerate(BENCHMARKS[name].classes):
            for number in range(3):
                image(root / domain / class_ / f"{number}.png", 10_000 * place + 7 * label + number)


def digits_dg(root: Path) -> None:
    for place, domain in enumerate(BENCHMARKS["digits-dg"].domains):
        for part, count in (("train", 2), ("val", 1)):
            for digit in range(10):
                for number in range(count):
                    image(root / domain / part / str(digit) / f"{number}.png", 10 * place + digit)


def camelyon17(root: Path) -> None:
    rows = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for index in range(60):
        slide, tumor = f"patient_{index:03d}_node_0", index % 2
        image(root / "patches" / slide / f"patch_{slide}_x_{index}_y_64.png", index, 96, 255 * tumor)
        rows.append(f"{index},{index:03d},0,{index},64,{tumor},{index},{index // 12},0")
    (root / "metadata.csv").write_text("\n".join(rows) + "\n")


def fed_isic2019(root: Path) -> None:
    rows = ["image,target,center,fold,fold2"]
    for index in range(96):
        image(root / "ISIC_2019_Training_Input_preprocessed" / f"ISIC_{index:07d}.jpg", index)
        rows.append(f"ISIC_{index:07d},{index % 8},{index // 16},{'train' if index % 3 else 'test'},x")
    (root / "train_test_split").write_text("\n".join(rows) + "\n")


def rotated_mnist(root: Path) -> None:
    """The four IDX files: magic number, sizes, bytes."""
    (root / "raw").mkdir()
    for part, count in (("train", 1200), ("t10k", 200)):
        pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8).tobytes()
        digits = bytes(index % 10 for index in range(count))
        for kind, sizes, content in (("images-idx3", (0x803, count, 28, 28), pixels),
                                     ("labels-idx1", (0x801, count), digits)):  # fmt: skip
            header = b"".join(number.to_bytes(4, "big") for number in sizes)
            (root / "raw" / f"{part}-{kind}-ubyte").write_bytes(header + content)


TREES: dict[str, tuple[str, Callable[[Path], None] | None]] = {
    "pacs": ("PACS", None), "vlcs": ("VLCS", None), "office-home": ("OfficeHomeDataset_10072016", None),
    "terra-incognita": ("terra_incognita", None), "domainnet": ("DomainNet", None),
    "domainnet-mini": ("domainnet126", None), "office-caltech-10": ("office_caltech_10", None),
    "office-caltech-home": ("OfficeCaltechHome", None), "digits-dg": ("digits_dg", digits_dg),
    "camelyon17": ("camelyon17_v1.0", camelyon17), "fed-isic2019": ("fed_isic2019", fed_isic2019),
    "rotated-mnist": ("MNIST", rotated_mnist),
}  # fmt: skip
QUICK = ("digits-dg", "camelyon17")  # data sets that are not read like a plain tree


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Function (data set, tree or its maker) -> settings; the row's counts are removed, because trees are small."""

    def make(name, tree=True, **more):
        folder, made = TREES[name]
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], counts=None, class_counts=None))
        if tree:
            root = tmp_path / "data" / folder
            root.mkdir(parents=True)
            made(root) if made else classes_tree(root, name)
        places = {"root": str(tmp_path / "data"), "cache": str(tmp_path / "c")}
        return DataSettings(**{"dataset": name, "image_size": SIDE, **places, **more})

    return make


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in TREES])
def test_the_published_layout_is_read(name, settings):
    """All domains of the row are there, with images of the size asked for and every class in all of them together."""
    domains = TWO_DOMAINS.get(name, list(BENCHMARKS[name].domains))
    data = settings(name, holdout=0.34, domains=TWO_DOMAINS.get(name, []))
    find_data(data)
    assert client_names(data, domains[-1]) == sorted(domains[:-1])
    images, labels, _ = load_target(data, domains[-1])
    parts = [load_client(data, client) for client in domains[:-1]]
    assert all(len(part.train) and len(part.validation) for part in parts)
    assert {one.images.shape[1:] for one in parts} == {images.shape[1:]}
    assert images.shape[2:] == (data.image_size,) * 2
    found = {*labels.tolist()}.union(*(part.labels.tolist() for part in parts))
    assert found == set(range(len(benchmark(data).classes)))


def test_every_row_of_files_is_tried_here():
    embedded, forms = {"digits", "digit-masks"}, {"folder", "table", "hugging-face", "masks"}
    assert set(BENCHMARKS) == set(TREES) | embedded | forms


@pytest.mark.parametrize("name", TREES)
def test_files_that_are_not_there_are_missed_before_anything_is_read(name, tmp_path, settings):
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "data"))):
        find_data(settings(name, tree=False, domains=TWO_DOMAINS.get(name, [])))


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


def test_fed_isic2019(settings):
    data = settings("fed-isic2019", test_split="list")
    _, found, tested = load_target(data, "center_1")  # 16, 24, 17, 25, ...; 24, 18, 27, 21, 30 are tested
    assert found.tolist() == sorted(2 * [*range(8)])
    assert tested.tolist() == [1, 4, 7, 10, 13]
    assert reader(data, benchmark(data)).listed("center_1", "train").tolist() == sorted({*range(16)} - {*tested})


def test_an_incomplete_copy_is_refused(tmp_path):
    image(tmp_path / "digitsdg" / "mnist" / "train" / "0" / "a.jpg")
    (tmp_path / "digitsdg" / "mnist" / "val").mkdir()
    data = DataSettings(dataset="digits-dg", root=str(tmp_path), cache=str(tmp_path / "c"))
    with pytest.raises(UserError, match=r"Digits-DG mnist is incomplete in .*: 1 of 6,000 images"):
        load_target(data, "mnist")
    with pytest.raises(UserError, match=r"Camelyon17: no 'metadata.csv' in"):
        load_target(DataSettings(dataset="camelyon17", root=str(tmp_path)), "hospital_0")


def fundus(root: Path) -> None:
    """Sites with images and masks: 255 is the background, 128 the disc, and 0 the cup inside the disc."""
    rows, columns = np.mgrid[:48, :48]
    for site in range(1, 5):
        (root / f"Domain{site}" / "mask").mkdir(parents=True)
        for number in range(6):
            image(root / f"Domain{site}" / "image" / f"g{number}.png", 10 * site + number, 48)
            distance = np.hypot(rows - 20 - number, columns - 24)
            mask = np.select([distance < 5, distance < 10], [0, 128], 255).astype(np.uint8)
            Image.fromarray(mask).save(root / f"Domain{site}" / "mask" / f"g{number}.png")


def test_the_fundus_protocol_runs(tmp_path):
    """A round of configs/fundus.toml with ELCFS on a tree in its layout, at 32 pixels with the small U-Net."""
    fundus(tmp_path)
    words = ["data.image_size=32", "model.backbone=unet-small", "train.rounds=1", "run.threads=1", "run.device=cpu",
             "method.name=elcfs", "run.target=Domain4", f"data.root={tmp_path}", f"data.cache={tmp_path / 'c'}",
             f"run.output={tmp_path / 'out'}"]  # fmt: skip
    rounds = numbers(launch(read_experiment("fundus", words)) / "rounds.csv")
    assert rounds[["target_dice", "mean_validation_dice"]].stack().dropna().between(0, 1).all()
    assert np.isfinite(rounds["train_loss"].iloc[1])
