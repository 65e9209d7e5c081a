"""Image trees on disk: order, labels, counts and messages."""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data.benchmarks import benchmark
from fedsim.data.catalog import BENCHMARKS
from fedsim.data.folders import list_domain
from fedsim.data.inspect import inspect
from fedsim.data.pixels import read_bytes
from fedsim.settings import DataSettings, data_root
from fedsim.settings.experiment import parse_experiment

PACS, OFFICE = BENCHMARKS["pacs"], BENCHMARKS["office-home"]


@pytest.fixture
def tree(tree_settings, tmp_path):
    return tree_settings(), tmp_path / "images" / "photo"


def files_of(data, domain="photo"):
    return list_domain(data, benchmark(data), domain).files


def test_order_and_labels_equal_torchvisions_image_folder(tree):
    from torchvision.datasets import ImageFolder

    data, folder = tree
    (folder / "cat" / "more").mkdir()
    for path in sorted((folder / "cat").glob("00[01].png")):
        path.rename(folder / "cat" / "more" / path.name)
    listing = list_domain(data, benchmark(data), "photo")
    samples = ImageFolder(str(folder)).samples
    assert [(str(listing.folder / file), label) for file, label in zip(listing.files, listing.labels)] == samples
    assert listing.labels.tolist() == [0] * 4 + [1] * 4


def test_folders_of_programs_and_loops_of_links_are_no_images(tree):
    """Thumbnails would be copies of training images in the validation part; side files and hidden files are ignored."""
    data, folder = tree
    before, cat, art = files_of(data), folder / "cat", folder.parent / "art"
    for name in ("@eaDir", ".thumbnails", "__MACOSX"):
        shutil.copytree(art / "cat", cat / name)
    shutil.copytree(art, folder / "@eaDir")
    for name in ("Thumbs.db", ".DS_Store", "list.txt", "._000.png"):
        (cat / name).touch()
    (folder.parent / "README.md").touch()
    (cat / "loop").symlink_to(cat)
    (cat / "parent").symlink_to(folder)
    linked = {f"cat/parent/dog/{index:03}.png" for index in range(4)}
    assert set(files_of(data)) == {*before, *linked}


def test_an_empty_class_and_a_foreign_file(tree):
    data, folder = tree
    for path in (folder / "dog").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="no image of class 'dog'"):
        files_of(data)
    (folder / "cat" / "clip.mp4").touch()
    with pytest.raises(UserError, match=r"clip.mp4: not an image"):
        files_of(data)


SHORT = "PACS photo is incomplete.*guitar has 150 of 186 images, person has 431 of 432 images"


@pytest.mark.parametrize(("domains", "found", "asked", "message"), [
    ({"photo": (189, 202, 182, 150, 199, 280, 431)}, PACS, "photo", SHORT),
    ({}, PACS, "photo", r"PACS: no domain folder \(art_painting, cartoon, photo, sketch\)"),
    ({"photo": (1,) * 7}, PACS, "sketch", r"domain 'sketch' has no folder"),
    ({"photo": (1,) * 7, "photo/cat": ()}, PACS, "photo", r"'cat' .* none of the benchmark's classes"),
    ({"cartoon": (389, 457, 346)}, PACS, "cartoon",
     r"4 of 7 class folders are missing .* first 'guitar' \(0 of 135 images\)"),
    (None, PACS, "photo", r"no folder .*absent; set data.root"),
])  # fmt: skip
def test_what_is_missing_is_named_in_one_line(tmp_path, domains, found, asked, message):
    for domain, counts in (domains or {}).items():
        (tmp_path / domain).mkdir()
        for name, count in zip(found.classes, counts):
            (tmp_path / domain / name.replace("_", " ")).mkdir()
            for index in range(count):
                (tmp_path / domain / name.replace("_", " ") / f"pic_{index:03}.jpg").touch()
    root = tmp_path if domains is not None else tmp_path / "absent"
    with pytest.raises(UserError, match=rf"\A.*(?:{message}).*\Z"):
        list_domain(DataSettings(dataset=found.name, root=str(root)), found, asked)


def test_what_cannot_be_read_to_an_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for name, said in (("pipe.png", "a pipe"), ("a\0b.png", "null byte"), ("no.png", "No such file")):
        with pytest.raises(UserError, match=f"cannot read the image .*{said}"):
            read_bytes(tmp_path / name)


@pytest.mark.parametrize(("files", "said"), [
    (["Train/0.png", "val/0.png", "test/0.png"], "Train, test, val, which are parts of a split"),
    (["train/0.png", "car/0.png", "__background__/0.png"], ""),
    (["a/0.png", "b/0.png", "__MACOSX/0.png"], ""),
])  # fmt: skip
def test_folders_of_a_split_are_no_classes_and_a_background_is_one(tmp_path, files, said):
    """Without a word a network would learn to tell training images from test images."""
    for file in (tmp_path / domain / file for domain in ("x", "y") for file in files):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(file)
    data = DataSettings(dataset="folder", root=str(tmp_path))
    if said:
        for read in (lambda: benchmark(data), lambda: inspect(tmp_path)):
            with pytest.raises(UserError, match=said):
                read()
    else:
        assert benchmark(data).classes == tuple(sorted(Path(file).parent.name for file in files if "MAC" not in file))


def test_home_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_experiment("", ["run.output=~/out"]).run.output == "/home/me/out"
    assert str(data_root(DataSettings(root="~/images"))) == "/home/me/images"
    with pytest.raises(UserError, match="~nobody-here/x: no home folder is known"):
        data_root(DataSettings(root="~nobody-here/x"))
