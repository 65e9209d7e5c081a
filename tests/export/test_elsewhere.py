"""A model is loaded where its run's images have been changed, moved or removed since."""

import shutil

import pandas as pd
import torch
from image_trees import write_tree
from PIL import Image
from typer.testing import CliRunner
from untrained_run import untrained_run

import fedsim
from fedsim.commands.cli import app
from fedsim.export.card import card
from fedsim.export.files import comparison_images
from fedsim.export.judge import predict
from fedsim.export.trained import describe

CLASSES = ("cat", "dog", "elk")
DOMAINS = ("art", "photo", "sketch")


def rows(root):
    files = sorted(write_tree(root, DOMAINS, CLASSES, 2).rglob("*.png"))
    parts = {"domain": [file.parts[-3] for file in files], "label": [file.parts[-2] for file in files]}
    return {"path": [str(file.relative_to(root)) for file in files], **parts}


def table(root):
    pd.DataFrame(rows(root)).to_csv(root / "mine.csv", index=False)
    return {"dataset": "table", "root": str(root / "mine.csv")}


def run_on(tmp_path):
    """An untrained run on these data, and an image that is not among them."""
    data = {**table(tmp_path / "data"), "image_size": 16, "cache": str(tmp_path / "cache")}
    Image.new("RGB", (12, 12), (10, 90, 200)).save(tmp_path / "one.png")
    return untrained_run(tmp_path / "seed0", data=data), tmp_path / "one.png"


def test_the_data_set_is_not_needed(tmp_path):
    run, picture = run_on(tmp_path)
    before = predict(fedsim.load(run), [picture])
    (tmp_path / "data").rename(tmp_path / "away")
    model = fedsim.load(run)
    pd.testing.assert_frame_equal(predict(model, [picture]), before)
    assert model.plan.clients == DOMAINS[:2]
    assert ", ".join(model.plan.clients) in card(model)
    assert "random images" in comparison_images(model)[1]  # with which an export is checked


def test_classes_are_those_of_the_run(tmp_path):
    """Another name now changes their order, and one class more their number."""
    run, picture = run_on(tmp_path)
    before, data = predict(fedsim.load(run), [picture]), tmp_path / "data"
    rows = (data / "mine.csv").read_text().replace(",cat", ",zebra")
    (data / "mine.csv").write_text(rows + "photo/cat/1.png,photo,yak\n")
    model = fedsim.load(run)
    assert model.classes == CLASSES
    pd.testing.assert_frame_equal(predict(model, [picture]), before)
    shown = CliRunner().invoke(app, ["evaluate", str(run)])
    assert "on this machine has other classes than in the run (cat" in str(shown.exception)


def test_masks_keep_the_structures_of_the_settings(tmp_path):
    data = {"dataset": "masks", "root": str(tmp_path / "data"), "structures": {"disc": [0, 128], "cup": [0]}}
    for domain in DOMAINS:
        (tmp_path / "data" / domain / "image").mkdir(parents=True)
    run = untrained_run(tmp_path / "seed0", "elcfs", data={**data, "image_size": 32}, model={"backbone": "unet-small"})
    shutil.rmtree(tmp_path / "data")
    model = fedsim.load(run)
    assert model.classes == ("disc", "cup")
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 2, 32, 32)
    output = "logits [N, classes, H, W]; a pixel is of a class where its logit's sigmoid is above 0.5"
    assert describe(model)["output"] == output
    assert describe(fedsim.load(untrained_run(tmp_path / "classes")))["output"] == "logits [N, classes]"
