"""Pictures of a run: t-SNE of its features, in which all domains are drawn, and the grids of a method."""

import numpy as np
import pytest
from image_trees import write_tree
from matplotlib.image import imread
from PIL import Image
from sklearn.metrics import silhouette_score
from support import run_small, small_experiment
from untrained_run import untrained_run

from clients.step.supervised import SupervisedStep
from fedsim.common.errors import UserError
from fedsim.export.features import domain_features, plot_features
from fedsim.export.pictures import draw_pictures
from fedsim.results import read_runs
from fedsim.results.reading import read_settings
from fedsim.results.report import pictures
from fedsim.run.plan import resolve


def features_of(run, per_domain):
    return domain_features(read_settings(run), run / "best.safetensors", per_domain)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_small(small_experiment(tmp_path_factory.mktemp("outputs"), train={"rounds": 6}))[0]


def test_features_are_of_all_domains_and_separate_classes_more_than_domains(run, monkeypatch):
    """They are the same again; a part's own check of a new run is not asked of a finished one."""
    features, classes, domains = features_of(run, 60)
    assert features.shape[0] == len(classes) == len(domains) == 240
    assert (sorted(np.unique(domains)), len(np.unique(classes))) == ([0, 1, 2, 3], 10)
    assert silhouette_score(features, classes) > silhouette_score(features, domains) + 0.05

    def check(part, experiment):
        raise UserError("images for the training are missing")

    monkeypatch.setattr(SupervisedStep, "check", check)
    again = features_of(run, 60)
    assert all((one == other).all() for one, other in zip((features, classes, domains), again))


def test_picture_and_its_place_in_the_report(run):
    """PNG and SVG have both legends; `fedsim report` embeds the pictures in the run's plots."""
    files = plot_features(run, run / "plots", 25)
    assert [file.name for file in files] == [f"features-fedavg-rot45-seed0.{kind}" for kind in ("png", "svg")]
    pixels = imread(files[0])
    assert min(pixels.shape[:2]) > 500
    assert 0.005 < float(np.mean(pixels[..., :3].min(axis=2) < 0.9)) < 0.6
    (picture,) = pictures(read_runs(run.parents[2]), "digits", {}, "last")
    assert "t-SNE of features by class and by domain: fedavg/rot45/seed0" in picture
    assert picture.count('src="data:image/png;base64,') == 1


@pytest.mark.parametrize("method", ["fedapt", "plan"])
def test_a_new_domain_is_shown_beside_those_of_the_run(tmp_path, method):
    """A network with something for each client is built for the clients of the run."""
    images = write_tree(tmp_path / "images", ["a", "b", "t"], ["cat", "dog"], 2)
    data = {"dataset": "folder", "root": str(images), "cache": str(tmp_path / "cache"), "image_size": 16}
    model = {"backbone": "tiny-clip", "head": "text", "train": "head"}
    run = untrained_run(tmp_path / "seed0", method, data=data, model=model, run={"target": "t"})
    write_tree(images, ["c"], ["cat", "dog"], 2)
    features, _, domains = features_of(run, 2)
    assert (sorted(set(domains)), features.shape) == ([0, 1, 2, 3], (8, 16))


def test_a_folder_without_a_model_is_said(tmp_path):
    with pytest.raises(UserError, match=r"holds no best.safetensors; name the folder of one run"):
        plot_features(tmp_path, tmp_path)


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
