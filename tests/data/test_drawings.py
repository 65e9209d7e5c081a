"""Drawings: the same emojis in five styles, a quarter of which no client has."""

import csv

import numpy as np
import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import benchmark, load_client, load_target
from fedsim.data.drawings import CLASSES, EMBEDDED, STYLES, SUBGROUPS, class_of, listed
from fedsim.data.reader import reader
from fedsim.settings import DataSettings


def settings(**changes):
    return DataSettings(dataset="drawings", image_size=32, holdout=0.15, split="stratified", **changes)


def test_the_embedded_set_is_what_its_row_says():
    bench = benchmark(settings())
    rows, labels = listed(EMBEDDED)
    assert bench.domains == STYLES
    assert bench.classes == CLASSES == tuple(sorted(SUBGROUPS))
    assert np.bincount(labels).tolist() == [129, 31, 127, 101, 43, 265, 72]
    read = reader(settings(), bench)
    for style in STYLES:
        images, of_clients = read.images(style)
        assert (images.shape, images.dtype, of_clients.dtype) == ((579, 3, 32, 32), np.uint8, np.int64)
        assert bench.counts[style] == len(images)
        # floor(n / 4) of each class
        assert np.bincount(read.images(style, apart=True)[1]).tolist() == [32, 7, 31, 25, 10, 66, 18]
    assert class_of("flag") == ""
    assert len({row["name"] for row in rows}) == len(rows)
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) < 3_000_000


def test_an_image_lies_where_its_line_says():
    """The 31st emoji begins the second line of the sheet."""
    images = reader(settings(), benchmark(settings()))
    sheet = np.asarray(Image.open(EMBEDDED / "noto.webp"))
    from fedsim.data.drawings import sheet_images

    assert (sheet_images("noto")[30] == sheet[32:64, :32].transpose(2, 0, 1)).all()
    assert (sheet_images("noto")[31] == sheet[32:64, 32:64].transpose(2, 0, 1)).all()
    black = images.images("openmoji_black")[0].astype(int)
    assert np.abs(black[:, 0] - black[:, 1]).mean() < 2  # black lines on white


def test_no_style_trains_on_what_another_validates_or_the_unseen_one_tests():
    data = settings(split_seed=3)
    bench = benchmark(data)
    read = reader(data, bench)
    apart = read.chosen(apart=True)
    assert not set(apart) & set(read.chosen(apart=False))
    noto, twemoji = (load_client(data, style) for style in ("noto", "twemoji"))
    assert (noto.train.tolist(), noto.validation.tolist()) == (twemoji.train.tolist(), twemoji.validation.tolist())
    assert not set(noto.train) & set(noto.validation)
    assert len(load_target(data, "fluent_3d")[2]) == 189
    other = reader(settings(split_seed=4), bench)
    assert set(other.chosen(apart=True)) != set(apart)
    assert (reader(settings(), bench).fingerprint("noto"), read.fingerprint("noto")) == (read.fingerprint("noto"),) * 2
    assert read.fingerprint("noto") != read.fingerprint("twemoji")


SOME = ("animal-bird", "time", "flag", "face-hat", "food-fruit", "hands", "person", "transport-air")


def full_set(folder):
    """A folder as docs/make_drawings.py writes it, with eight emojis in each subgroup."""
    rows = [(f"{name}_{index}", "any", name, "1f600") for name in SOME for index in range(8)]
    for style, shade in zip(STYLES, range(50, 255, 40)):
        (folder / style / "any").mkdir(parents=True)
        for index, (name, *_) in enumerate(rows):
            Image.new("RGB", (64, 64), (shade, index, 0)).save(folder / style / "any" / f"{name}.png")
    with (folder / "emoji.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("name", "group", "subgroup", "unicode"), *rows])
    return folder


def test_the_full_set_is_read_from_its_folder(tmp_path):
    data = settings(root=str(full_set(tmp_path / "set"))).model_copy(update={"image_size": 64})
    read = reader(data, benchmark(data))
    images, labels = read.images("noto")
    assert images.shape == (42, 3, 64, 64)  # seven of the eight subgroups have a class; two of eight are apart
    assert np.bincount(labels).tolist() == [6] * 7
    assert (images[:, 0] == 90).all()
    before = read.fingerprint("noto")
    Image.new("RGB", (64, 64), "white").save(tmp_path / "set" / "noto" / "any" / "person_0.png")
    assert read.fingerprint("noto") != before


def test_a_folder_that_is_not_the_full_set_is_refused(tmp_path):
    data = settings(root=str(tmp_path))
    with pytest.raises(UserError, match=r"no emoji\.csv with the columns.*embedded images"):
        reader(data, benchmark(data)).find()
