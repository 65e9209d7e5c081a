"""Grids of pictures: one file per source client, and a clear message when there is nothing to draw."""

import pytest
from PIL import Image
from support import small_experiment

from fedsim.common.errors import UserError
from fedsim.export.pictures import draw_pictures
from fedsim.run.plan import resolve

SMALL = {"fraction": 0.03, "domains": ["rot0", "rot15", "rot45"]}


@pytest.mark.parametrize(
    "method",
    [
        {"name": "ccst", "cross_client_style": {"encoder": "haar", "styles": "single"}},
        {"name": "fisc", "style_contrast": {"content_variance": "unbiased"}},
        "elcfs",
        "fedccrl",
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
