"""Grids of pictures: one file per source client, and a clear message when there is nothing to draw."""

import pytest
import torch
from PIL import Image
from support import small_experiment

from fedsim.common.errors import UserError
from fedsim.export.pictures import draw_pictures, save_grid
from fedsim.run.plan import resolve

SMALL = {"fraction": 0.03, "domains": ["rot0", "rot15", "rot45"]}


@pytest.mark.parametrize(
    "method",
    [
        {"name": "ccst", "cross_client_style": {"encoder": "haar", "styles": "single"}},
        {"name": "fisc", "style_contrast": {"content_variance": "unbiased"}},
        {"name": "elcfs", "episodic_step": {"L_w": 0.1}},
        {"name": "fedccrl"},
    ],
)
def test_one_grid_per_source_client(method, tmp_path):
    files = draw_pictures(resolve(small_experiment(tmp_path, method, data=SMALL)), tmp_path, rows=2)
    assert [file.stem.rsplit("-", 1)[1] for file in files] == ["rot0", "rot15"]
    for file in files:
        with Image.open(file) as image:
            assert image.size[0] > 100


def test_a_method_without_pictures_says_so(tmp_path):
    with pytest.raises(UserError, match="does not change images by means of a bank"):
        draw_pictures(resolve(small_experiment(tmp_path)), tmp_path)


def test_the_grid_shows_the_pixels_it_was_given(tmp_path):
    red = torch.zeros(1, 3, 8, 8)
    red[:, 0] = 1
    file = save_grid([("red", red), ("black", torch.zeros(1, 1, 8, 8))], "two", tmp_path / "grid.png")
    with Image.open(file) as image:
        colours = {colour[:3] for _, colour in image.getcolors(1 << 20)}
    assert {(255, 0, 0), (0, 0, 0), (255, 255, 255)} <= colours
