"""VLCS as most people have it: DOMAIN/{train,crossval,test,full}/CLASS, with classes by name or by number."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import benchmark, load_client, load_target
from fedsim.data.catalog import BENCHMARKS
from fedsim.data.reader import reader
from fedsim.runs.no_effect import data_facts
from fedsim.settings import DataSettings
from fedsim.settings.effect import Trait
from fedsim.settings.experiment import Experiment

FOLDERS = {"Caltech101": "CALTECH", "LabelMe": "LABELME", "SUN09": "SUN", "VOC2007": "PASCAL"}
PARTS = {"train": (0, 1, 2), "crossval": (3,), "test": (4, 5), "full": (0, 1, 2, 3)}
CLASSES = ("bird", "car", "chair", "dog", "person")


@pytest.fixture
def vlcs(tmp_path, monkeypatch):
    """A function that writes six images of each class and domain and returns settings for them."""
    few = dict.fromkeys(FOLDERS, (6,) * len(CLASSES))
    small = replace(BENCHMARKS["vlcs"], counts=dict.fromkeys(FOLDERS, 30), class_counts=few)
    monkeypatch.setitem(BENCHMARKS, "vlcs", small)

    def write(names, **settings):
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (4, 5, 6, 8, 8, 3), dtype=np.uint8)
        for d, folder in enumerate(FOLDERS.values()):
            for part, numbers in PARTS.items():
                for c, name in enumerate(names):
                    place = tmp_path / "VLCS" / folder / part / name
                    place.mkdir(parents=True, exist_ok=True)
                    for number in numbers:
                        Image.fromarray(pixels[d, c, number]).save(place / f"{number}.png")
        roots = {"root": str(tmp_path), "cache": str(tmp_path / "cache"), "image_size": 8}
        return DataSettings(dataset="vlcs", **roots, **settings)

    return write


@pytest.mark.parametrize("names", [CLASSES, tuple("01234")])
def test_every_image_is_read_once_under_the_usual_names(vlcs, names):
    data = vlcs(names)
    bench = benchmark(data)
    assert bench.domains == tuple(FOLDERS)
    read = reader(data, bench)
    read.find()
    assert np.bincount(read.labels("SUN09")).tolist() == [6] * 5
    assert read.findings() == []
    assert len({row.tobytes() for row in read.digests("VOC2007")}) == 30
    images, _, indices = load_target(data, "LabelMe")
    assert (images.shape, len(indices)) == ((30, 3, 8, 8), 30)


def test_its_parts_are_the_published_ones(vlcs):
    data = vlcs(tuple("01234"), split="lists", test_split="list")
    client = load_client(data, "Caltech101")
    assert (len(client.train), len(client.validation)) == (15, 5)
    assert len(load_target(data, "SUN09")[2]) == 10
    assert data_facts(Experiment(data=data), benchmark(data))[Trait.FOLDERS]  # DomainBed's folders take lists


def test_another_folder_and_missing_images_are_refused(vlcs, tmp_path):
    data = vlcs(tuple("01234"))
    (tmp_path / "VLCS" / "SUN" / "test" / "5").mkdir()
    read = reader(data, benchmark(data))
    with pytest.raises(UserError, match=r"SUN/test/5 is none of the classes bird, .*, which may be numbered from 0"):
        read.labels("SUN09")
    (tmp_path / "VLCS" / "CALTECH" / "train" / "0" / "0.png").unlink()
    with pytest.raises(UserError, match="VLCS Caltech101 is incomplete"):
        read.labels("Caltech101")
