"""Copies among the images that train: of two source domains, and of one picture in training and validation."""

import numpy as np
import pytest
from image_trees import write_tree
from PIL import Image

from fedsim.data import benchmark, load_client
from fedsim.data.beside import image_looks
from fedsim.data.image_tree import ImageTree
from fedsim.data.shared_images import near_copies, shared_images
from fedsim.results.provenance import shared_notes
from fedsim.settings import DataSettings


def settings(tree, **changes):
    return DataSettings(dataset="folder", root=str(tree), cache=str(tree.parent / "cache"), image_size=64, **changes)


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "images", ["art", "photo", "sketch"], ["cat", "dog"], 10)


def picture(seed):
    """A smooth picture, as JPEG is made for."""
    few = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(few).resize((90, 80), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(("ending", "options"), [("bmp", {}), ("jpg", {"quality": 90})])
def test_the_same_picture_in_training_and_validation_is_said(tree, ending, options):
    """Each picture of art is there twice. Only pairs that the split parts, and inside one class, count."""
    for name, first in (("cat", 100), ("dog", 200)):
        for file in (tree / "art" / name).iterdir():
            file.unlink()
        for seed in range(first, first + 10):
            picture(seed).save(tree / "art" / name / f"{seed}.png")
            picture(seed).save(tree / "art" / name / f"{seed}-again.{ending}", **options)
    data = settings(tree, holdout=0.3)
    found, client = shared_images(data, "sketch"), load_client(data, "art")
    files = np.array([name.split("/")[-1].split(".")[0].split("-")[0] for name in listing_of(data, "art").files])
    parted = int(np.isin(files[client.validation], files[client.train]).sum())
    assert 0 < parted < len(client.validation)
    assert found.record() == {"validation": {"art": (parted, len(client.validation))}}
    said = (
        f"{parted} of the {len(client.validation)} validation images of art look like a training image of their class"
    )
    assert found.remarks() == [said]
    assert shared_notes({"run": {"shared_images": found.record()}}) == [f"Copies: {said}."]


def listing_of(data, domain):
    return ImageTree(data, benchmark(data)).listing(domain)


def test_two_source_domains_with_the_same_files_are_one_remark(tree):
    for file in sorted((tree / "photo" / "cat").iterdir())[:3]:
        (tree / "art" / "dog" / f"copy-{file.name}").write_bytes(file.read_bytes())
    said = "art and photo share 3 images, 15.0% of the smaller domain, byte for byte"
    assert shared_images(settings(tree), "sketch").remarks() == [said]


def test_looks_by_hand(tmp_path):
    """A side of 20 pixels has parts of 2 and 3; a part that differs by 4 is another picture, 3 is the same."""
    pixels = np.zeros((20, 20, 3), np.uint8)
    pixels[:2, :2] = (10, 20, 30)
    pixels[2:5, 2:5, 0] = np.arange(9).reshape(3, 3)
    tree = write_tree(tmp_path / "images", ["art"], ["cat", "dog"], 1)
    Image.fromarray(pixels).save(tree / "art" / "cat" / "000.png")
    looks = image_looks(listing_of(settings(tree), "art"), "folder", "art", 20, tmp_path / "cache")[0].reshape(3, 8, 8)
    assert looks[:, 0, 0].tolist() == [10, 20, 30]
    assert looks[0, 1, 1] == 4
    others = np.array([[10, 20], [100, 100]], np.uint8)
    assert [near_copies(np.array([own], np.uint8), others) for own in ([13, 17], [14, 20], [6, 24])] == [1, 0, 0]
