"""A model is loaded where its images changed or are gone. Its rule does not depend on batches, and moves with it."""

import itertools
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from image_trees import write_tree
from PIL import Image
from typer.testing import CliRunner
from untrained_run import untrained_run

import fedsim
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.data import load_target
from fedsim.export.card import card
from fedsim.export.files import comparison_images, export
from fedsim.export.inference import evaluate, evaluate_arrays, labelled_images, predict
from fedsim.export.trained import describe
from fedsim.runs.target import TargetEvaluator
from fedsim.runs.workspace import Workspace

CLASSES = ("cat", "dog", "elk")
DOMAINS = ("art", "photo", "sketch")


def table(root):
    files = sorted(write_tree(root, DOMAINS, CLASSES, 2).rglob("*.png"))
    parts = {"domain": [file.parts[-3] for file in files], "label": [file.parts[-2] for file in files]}
    rows = {"path": [str(file.relative_to(root)) for file in files], **parts}
    pd.DataFrame(rows).to_csv(root / "mine.csv", index=False)
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
    data |= {"image_size": 32}
    run = untrained_run(tmp_path / "seed0", "elcfs", data=data, model={"backbone": "unet-small"})
    data |= {"largest_component": True}
    largest = untrained_run(tmp_path / "seed1", "elcfs", data=data, model={"backbone": "unet-small"})
    shutil.rmtree(tmp_path / "data")
    model = fedsim.load(run)
    assert model.classes == ("disc", "cup")
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 2, 32, 32)
    output = "logits [N, classes, H, W]; a pixel is of a class where its logit's sigmoid is above 0.5"
    assert describe(model)["output"] == output
    assert describe(fedsim.load(untrained_run(tmp_path / "classes")))["output"] == "logits [N, classes]"
    assert f"Outputs: disc, cup; {output}; of these only the largest connected component." in card(fedsim.load(largest))


def test_the_card_says_where_the_unseen_domain_was_trained_on(tmp_path):
    run, _ = run_on(tmp_path)
    assert "No image of sketch was trained on." in card(fedsim.load(run))
    file = run / "environment.json"
    shared = {"target": "sketch", "images": 6, "shared": 2, "sources": {"art": 2}, "unit": "images"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shared_images": shared}))
    text = card(fedsim.load(run))
    assert "No image of sketch" not in text
    assert "2 of 6 images of sketch (in art 2)" in text


DATA = {"domains": ["rot0", "rot45"], "fraction": 0.2, "split": "stratified"}  # 160 images of rot45


def model_of(folder, rule, size):
    method = {"name": "fedavg", "infer": rule, rule: {"batch": 32}}
    run = {"target": "rot45", "threads": 1, "device": "cpu", "evaluate_batch_size": size}
    return fedsim.load(untrained_run(folder / str(size), method, data=DATA, run=run), "last")


@pytest.mark.parametrize("rule", ["tsmo_bn", "random_alpha", "recompute"])
def test_evaluation_batches_change_nothing(tmp_path, rule):
    """256 is a multiple of the 32 images that the rule takes at once, 100 is not, and 16 is less than they are."""
    losses = []
    for size in (256, 100, 16):
        model = model_of(tmp_path, rule, size)
        space = Workspace(model.plan)
        score = TargetEvaluator(space)({name: space.net.state_dict()[name].numpy() for name in space.travelling}, {})
        losses.append(score.loss)
        measures, _ = evaluate_arrays(model, "rot45", *load_target(model.experiment.data, "rot45"))
        assert measures["accuracy"][0] == pytest.approx(score.value, abs=1e-12)
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)


@pytest.mark.parametrize("rule", ["tsmo_bn", "recompute"])
def test_files_of_a_folder_come_in_a_random_order_and_in_the_order_of_the_table(tmp_path, rule, monkeypatch):
    """A folder lists its images class by class; batches of one class would have the statistics of one class."""
    model = model_of(tmp_path, rule, 16)
    images, labels, indices = load_target(model.experiment.data, "rot45")
    for index in indices[:80]:
        file = tmp_path / "tree" / "scan" / str(labels[index]) / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[index][0]).save(file)
    files = sorted((tmp_path / "tree").rglob("*.png"))
    _, own = evaluate_arrays(model, "rot45", images, labels, np.array([int(file.stem) for file in files]))
    own = own.set_index("image").loc[[f"rot45[{file.stem}]" for file in files]]
    seen, prepare = [], model.prepare
    monkeypatch.setattr(model, "prepare", lambda part: seen.extend(part) or prepare(part))
    for table in (evaluate(model, labelled_images(tmp_path / "tree", model.classes))[1], predict(model, files)):
        assert table["image"].tolist() == [str(file) for file in files]
        pd.testing.assert_series_equal(table["probability"], own["probability"].reset_index(drop=True), rtol=1e-4)
    classes = [file.parent.name for file in seen[: len(files)]]
    assert sum(one != other for one, other in itertools.pairwise(classes)) > len(files) / 2


INDUCTIVE = ("fixed_alpha", "iabn", "mix_norm", "random_alpha")
METHODS = {rule: {"name": "fedavg", "infer": rule} for rule in INDUCTIVE} | {"fedsr": "fedsr"}
METHODS["mix_norm"] |= {"mix_norm": {"views": 2}}


@pytest.mark.parametrize("method", METHODS)
def test_an_inductive_rule_moves_with_the_model(tmp_path, capfd, method):
    model, images = fedsim.load(untrained_run(tmp_path / "seed0", METHODS[method])), torch.rand(3, 1, 28, 28)
    if method == "random_alpha":
        with pytest.raises(UserError, match="RandomAlpha draws numbers at every prediction, which no file holds"):
            export(model, "torch", tmp_path / "model.pt2")
        assert capfd.readouterr().err == ""
    with torch.inference_mode():
        before = fedsim.load(tmp_path / "seed0")(images)
        moved = fedsim.load(tmp_path / "seed0").double()(images.double())
    torch.testing.assert_close(moved.float(), before, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rule", ["tsmo_bn", "recompute"])
@torch.inference_mode()
def test_a_transductive_rule_adapts_again(tmp_path, rule):
    model = fedsim.load(untrained_run(tmp_path / "seed0", {"name": "fedavg", "infer": rule}))
    images = torch.rand(4, 1, 28, 28)
    before = model.adapt([images])(images)
    model.double()
    with pytest.raises(UserError, match="uses images of the unseen domain first; call adapt"):
        model(images.double())
    with pytest.raises(UserError, match="no single file holds the model"):
        export(model, "onnx", tmp_path / "model.onnx")
    moved = model.adapt([images.double()])(images.double())
    torch.testing.assert_close(moved.float(), before, atol=1e-4, rtol=0)
