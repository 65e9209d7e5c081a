"""Hugging Face data sets on disk."""

import numpy as np
import pytest
from PIL import Image

from fedsim.data import benchmark, load_client, load_target
from fedsim.data.reader import reader
from fedsim.errors import UserError
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
