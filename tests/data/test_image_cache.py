"""The decode-once cache: content, rebuilding, several processes, damage and bad images."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clients.local_data import LocalData
from fedsim.common.errors import UserError
from fedsim.data import cache as cache_module
from fedsim.data import load_client, load_pooled
from fedsim.data.augment import AUGMENTATIONS, Transforms, make_transforms
from fedsim.data.benchmarks import benchmark
from fedsim.data.cache import Entry
from fedsim.data.fingerprint import fingerprints
from fedsim.data.folders import list_domain


@pytest.fixture
def load(tree_settings, tmp_path):
    """Function (settings) -> the cached images and labels of `photo`."""

    def read(data=None, cache=tmp_path / "cache"):
        data = data or tree_settings()
        listing = list_domain(data, benchmark(data), "photo")
        return Entry(listing, "folder", "photo", data.image_size, cache).arrays()[:2]

    return read


def entries(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "folder").iterdir())


def test_images_are_rgb_resized_like_torchvision(load, tmp_path):
    from torchvision.transforms import Resize
    from torchvision.transforms.functional import pil_to_tensor

    images, labels = load()
    assert (images.shape, images.dtype) == ((8, 3, 8, 8), np.uint8)
    assert isinstance(images, np.memmap)
    assert not images.flags.writeable
    assert labels.tolist() == [0] * 4 + [1] * 4
    with Image.open(tmp_path / "images" / "photo" / "dog" / "001.png") as image:
        expected = pil_to_tensor(Resize((8, 8))(image.convert("RGB"))).numpy()
    assert (images[5] == expected).all()


def test_sizes_are_those_of_the_files_upright(tree_settings, tmp_path):
    """They are 10 x 12 pixels; one image is rotated by its EXIF data, and one domain has square images."""
    data, folder = tree_settings(), tmp_path / "images"
    turned = Image.new("RGB", (30, 20))
    exif = turned.getexif()
    exif[274] = 6  # a quarter turn
    turned.save(folder / "photo" / "cat" / "000.png", exif=exif)
    for file in (folder / "art").rglob("*.png"):
        Image.new("RGB", (9, 9)).save(file)
    photo = load_client(data, "photo")
    assert photo.sizes.tolist() == [[30, 20]] + [[12, 10]] * 7
    assert load_client(data, "art").sizes is None
    assert load_pooled(data, "sketch").sizes.tolist() == [[1, 1]] * 8 + photo.sizes.tolist()


def test_a_client_crops_with_its_images_aspect_ratios(tree_settings):
    data = tree_settings(augment="ccst")
    client = load_client(data, "photo")
    local, positions = LocalData(client, make_transforms(data, 3), torch.device("cpu")), np.array([2, 0, 1])
    torch.manual_seed(0)
    made = local.batch(positions).images
    torch.manual_seed(0)
    sizes = torch.from_numpy(client.sizes[client.train[positions]])
    assert torch.equal(made, AUGMENTATIONS["ccst"](local.raw(positions), sizes))
    own = Transforms(lambda images: images * 0, local.transforms.normalize)
    assert not LocalData(client, own, torch.device("cpu")).batch(positions).images.any()


def test_second_use_decodes_nothing(load, tmp_path, monkeypatch):
    first, _ = load()
    monkeypatch.setattr(cache_module, "_write_images", None)
    assert (first == load()[0]).all()
    assert len(entries(tmp_path)) == 1
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the image cache .*FEDSIM_CACHE"):
        load(cache=tmp_path / "file")


def bitmaps(root: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed)
    for number in range(8):
        file = root / ("cat", "dog")[number // 4] / f"{number}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file)
        os.utime(file, (0, 0))


@pytest.mark.parametrize("places", [("one", "two"), ("one", "one")])
def test_files_with_equal_names_sizes_and_times_are_told_apart(tree_settings, tmp_path, places):
    """In another folder, and in the same one after they were written again: neither pixels nor fingerprint are old."""
    seen = []
    for seed, place in enumerate(places):
        data = tree_settings(root=str(tmp_path / place))
        for domain, own in (("photo", seed), ("art", 9)):
            bitmaps(tmp_path / place / domain, own)
        seen.append((np.array(load_client(data, "photo").images), fingerprints(data)))
    assert (seen[0][0] != seen[1][0]).any()
    assert [seen[0][1][domain] == seen[1][1][domain] for domain in ("photo", "art")] == [False, True]


def test_the_loser_of_a_race_discards_its_own(load, tmp_path, monkeypatch):
    write = cache_module._write_images

    def slow(*given):
        monkeypatch.setattr(cache_module, "_write_images", write)
        load()  # another process finishes while this one still decodes
        return write(*given)

    monkeypatch.setattr(cache_module, "_write_images", slow)
    assert len(load()[0]) == 8
    assert len(entries(tmp_path)) == 1


def test_damaged_entry_is_rebuilt(load, tmp_path):
    first = np.array(load()[0])
    [entry] = (tmp_path / "cache" / "folder").iterdir()
    for damage in (
        lambda: (entry / "images.npy").write_bytes((entry / "images.npy").read_bytes()[:200]),
        (entry / "labels.npy").unlink,
        lambda: (entry / "manifest.json").write_text("{"),
    ):
        damage()
        assert (load()[0] == first).all()
        assert entries(tmp_path) == [entry.name]


def test_old_leftovers_are_removed_and_young_ones_kept(load, tmp_path):
    for name, age in ((".tmp-old", 2 * cache_module.DAY), (".tmp-young", 0)):
        (tmp_path / "cache" / "folder" / name).mkdir(parents=True)
        os.utime(tmp_path / "cache" / "folder" / name, (time.time() - age,) * 2)
    load()
    assert [name for name in entries(tmp_path) if name.startswith(".tmp")] == [".tmp-young"]
