"""Small image trees for tests of data, and the real data if they are on this machine."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsim.settings import DataSettings

SHARED = Path(__file__).parents[1].parent / "shared" / "data"


@pytest.fixture
def real_data() -> Path:
    if not (SHARED / "PACS").is_dir():
        pytest.skip(f"the real PACS and MNIST images are not at {SHARED}")
    return SHARED


def _write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_tree(folder: Path, domains: Sequence[str], classes: Sequence[str], per_class: int, seed: int = 0) -> Path:
    """Writes folder/domain/class/<n>.png, every image another one (numbered from the seed), and returns the folder."""
    for domain in domains:
        for name in classes:
            for index in range(per_class):
                _write_image(folder / domain / name / f"{index:03}.png", seed)
                seed += 1
    return folder


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """make_tree(domains, classes, per_class) writes root/domain/class/<n>.png and returns root."""

    def make(domains=("art", "photo", "sketch"), classes=("cat", "dog"), per_class: int = 4) -> Path:
        return write_tree(tmp_path / "images", domains, classes, per_class)

    return make


@pytest.fixture
def tree_settings(make_tree, tmp_path: Path) -> Callable[..., DataSettings]:
    """Settings of a "folder" data set of 3 domains x 2 classes x 4 images; keyword arguments are settings."""

    def settings(**changes) -> DataSettings:
        if not (tmp_path / "images").exists():
            make_tree()
        folders = {"root": str(tmp_path / "images"), "cache": str(tmp_path / "cache")}
        return DataSettings(**{"dataset": "folder", "image_size": 8, **folders, **changes})

    return settings
