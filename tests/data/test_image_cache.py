"""The decode-once cache: content, rebuilding, several processes, damage and bad images."""

import os
import subprocess
import sys
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
from fedsim.data.cache import cached_images
from fedsim.data.fingerprint import fingerprints
from fedsim.data.folders import list_domain
from fedsim.data.pixels import decode


def load(data, cache: Path, report=None):
    listing = list_domain(data, benchmark(data), "photo")
    return cached_images(listing, "folder", "photo", data.image_size, cache, report)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "folder").iterdir())


def test_images_are_rgb_resized_like_torchvision(tree_settings, tmp_path):
    from torchvision.transforms import Resize
    from torchvision.transforms.functional import pil_to_tensor

    data = tree_settings(image_size=8)
    images, labels = load(data, tmp_path / "cache")
    assert images.shape == (8, 3, 8, 8)
    assert images.dtype == np.uint8
    assert isinstance(images, np.memmap)
    assert not images.flags.writeable
    assert labels.tolist() == [0] * 4 + [1] * 4
    with Image.open(tmp_path / "images" / "photo" / "dog" / "001.png") as image:
        expected = pil_to_tensor(Resize((8, 8))(image.convert("RGB"))).numpy()
    assert (images[5] == expected).all()


def test_sizes_are_those_of_the_files_upright(tree_settings, tmp_path):
    """They are 10 x 12 pixels; one image is rotated by its EXIF data, and one domain has square images."""
    data = tree_settings(image_size=8)
    folder = tmp_path / "images"
    turned = Image.new("RGB", (30, 20))
    exif = turned.getexif()
    exif[274] = 6  # a quarter turn
    turned.save(folder / "photo" / "cat" / "000.png", exif=exif)
    for file in (folder / "art").rglob("*.png"):
        Image.new("RGB", (9, 9)).save(file)
    photo, art = load_client(data, "photo"), load_client(data, "art")
    assert photo.sizes.tolist() == [[30, 20]] + [[12, 10]] * 7
    assert art.sizes is None
    pooled = load_pooled(data, "sketch")
    assert pooled.sizes.tolist() == [[1, 1]] * 8 + photo.sizes.tolist()


def test_a_client_crops_with_its_images_aspect_ratios(tree_settings):
    """The augmentation gets the images with their original sizes; a user's own function gets no sizes."""
    data = tree_settings(image_size=8, augment="ccst")
    client = load_client(data, "photo")
    local = LocalData(client, make_transforms(data, 3), torch.device("cpu"))
    positions = np.array([2, 0, 1])
    torch.manual_seed(0)
    ours = local.batch(positions).images
    raw, sizes = local.raw(positions), torch.from_numpy(client.sizes[client.train[positions]])
    torch.manual_seed(0)
    assert torch.equal(ours, AUGMENTATIONS["ccst"](raw, sizes))
    torch.manual_seed(0)
    assert not torch.equal(ours, AUGMENTATIONS["ccst"](raw))
    own = Transforms(lambda images: images * 0, local.transforms.normalize)
    assert not LocalData(client, own, torch.device("cpu")).batch(positions).images.any()


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGB"])
def test_every_image_mode_becomes_three_channels(write_image, tmp_path, mode):
    write_image(tmp_path / "image.png", 0, mode=mode)
    assert decode(tmp_path / "image.png", 16).shape == (3, 16, 16)


def test_real_sketches_have_three_channels(real_data):
    path = next((real_data / "PACS" / "sketch" / "dog").iterdir())
    assert decode(path, 32).shape == (3, 32, 32)


def test_second_use_decodes_nothing(tree_settings, tmp_path, monkeypatch):
    data = tree_settings()
    seen = []
    first, _ = load(data, tmp_path / "cache", lambda done, total: seen.append((done, total)))
    assert seen[-1] == (8, 8)
    monkeypatch.setattr(cache_module, "decode_sized", None)
    second, _ = load(data, tmp_path / "cache")
    assert (first == second).all()
    assert len(entries(tmp_path / "cache")) == 1


def bitmaps(root: Path, seed: int) -> Path:
    """A tree whose files have the same names, sizes and modification times for every seed, and other pixels."""
    pixels = np.random.default_rng(seed)
    for number in range(8):
        file = root / ("cat", "dog")[number // 4] / f"{number}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file)
        os.utime(file, (0, 0))
    return root


@pytest.mark.parametrize("places", [("one", "two"), ("one", "one")])
def test_files_with_equal_names_sizes_and_times_are_told_apart(tree_settings, tmp_path, places):
    """In another folder, and in the same one after they were written again: neither pixels nor fingerprint are old."""
    seen = []
    for seed, place in enumerate(places):
        bitmaps(tmp_path / place / "photo", seed)
        bitmaps(tmp_path / place / "art", 9)
        data = tree_settings(root=str(tmp_path / place))
        seen.append((np.array(load_client(data, "photo").images), fingerprints(data)))
    assert (seen[0][0] != seen[1][0]).any()
    assert seen[0][1]["photo"] != seen[1][1]["photo"]
    assert seen[0][1]["art"] == seen[1][1]["art"]


def test_rebuilt_when_source_or_size_changes(tree_settings, write_image, tmp_path):
    data = tree_settings()
    first, _ = load(data, tmp_path / "cache")
    path = tmp_path / "images" / "photo" / "cat" / "000.png"
    write_image(path, 999)
    os.utime(path, ns=(1, 1))
    changed, _ = load(data, tmp_path / "cache")
    assert (first[0] != changed[0]).any()
    assert (first[1:] == changed[1:]).all()
    assert load(tree_settings(image_size=9), tmp_path / "cache")[0].shape[-1] == 9
    write_image(path.with_name("100.png"), 5)
    assert len(load(data, tmp_path / "cache")[0]) == 9
    assert len(entries(tmp_path / "cache")) == 4


def test_two_processes_build_the_same_entry(tree_settings, make_tree, tmp_path):
    make_tree(per_class=40)
    code = (
        "import sys, time; from fedsim.data import load_client; from fedsim.settings import DataSettings\n"
        "import fedsim.data.cache\n"
        "data = DataSettings(dataset='folder', root=sys.argv[1], cache=sys.argv[2], image_size=32)\n"
        "time.sleep(max(0, float(sys.argv[3]) - time.time()))\n"
        "print(int(load_client(data, 'photo').images.astype('int64').sum()))"
    )
    start = str(time.time() + 1.5)
    command = [sys.executable, "-c", code, str(tmp_path / "images"), str(tmp_path / "cache"), start]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sums = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sums[0] == sums[1]
    assert len(entries(tmp_path / "cache")) == 1


def test_the_loser_of_a_race_discards_its_own(tree_settings, tmp_path, monkeypatch):
    data = tree_settings()
    write = cache_module._write_images

    def slow(listing, manifest, path, report, planes):
        monkeypatch.setattr(cache_module, "_write_images", write)
        load(data, tmp_path / "cache")  # another process finishes while this one still decodes
        return write(listing, manifest, path, report, planes)

    monkeypatch.setattr(cache_module, "_write_images", slow)
    images, _ = load(data, tmp_path / "cache")
    assert len(images) == 8
    assert len(entries(tmp_path / "cache")) == 1


def test_corrupt_image_is_named_and_nothing_is_left(tree_settings, tmp_path):
    data = tree_settings()
    path = tmp_path / "images" / "photo" / "dog" / "002.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UserError, match=r"cannot read the image .*photo/dog/002.png"):
        load(data, tmp_path / "cache")
    path.write_text("no image")
    with pytest.raises(UserError, match=r"cannot read the image .*photo/dog/002.png") as error:
        load(data, tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert entries(tmp_path / "cache") == []


def test_damaged_entry_is_rebuilt(tree_settings, tmp_path):
    data = tree_settings()
    first = np.array(load(data, tmp_path / "cache")[0])
    [entry] = (tmp_path / "cache" / "folder").iterdir()
    for damage in ("truncate", "delete", "manifest"):
        if damage == "truncate":
            (entry / "images.npy").write_bytes((entry / "images.npy").read_bytes()[:200])
        elif damage == "delete":
            (entry / "labels.npy").unlink()
        else:
            (entry / "manifest.json").write_text("{")
        assert (load(data, tmp_path / "cache")[0] == first).all()
        assert entries(tmp_path / "cache") == [entry.name]


def test_old_leftovers_are_removed_and_young_ones_kept(tree_settings, tmp_path):
    folder = tmp_path / "cache" / "folder"
    for name in (".tmp-old", ".tmp-young"):
        (folder / name).mkdir(parents=True)
    two_days_ago = time.time() - 2 * cache_module.DAY
    os.utime(folder / ".tmp-old", (two_days_ago, two_days_ago))
    load(tree_settings(), tmp_path / "cache")
    assert [name for name in entries(tmp_path / "cache") if name.startswith(".tmp")] == [".tmp-young"]


def test_cache_that_cannot_be_written(tree_settings, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the image cache .*FEDSIM_CACHE"):
        load(tree_settings(), tmp_path / "file")
