"""Inference rules that look at several images at once do not depend on `run.evaluate_batch_size`."""

import itertools

import pandas as pd
import pytest
import torch
from PIL import Image
from support import run_small, small_experiment

import fedsim
from fedsim.data import load_target
from fedsim.export.judge import evaluate, evaluate_arrays, labelled_images, predict
from fedsim.models.infer import EvalMode, RandomAlpha, Recompute, TsmoBN

RULES = {"tsmo_bn": TsmoBN, "random_alpha": RandomAlpha, "recompute": Recompute}


def experiment(folder, rule, batch=32, size=256):
    method = {"name": "fedavg", "infer": rule, rule: {"batch": batch}}
    return small_experiment(folder, method, train={"rounds": 1}, run={"evaluate_batch_size": size})


@pytest.mark.parametrize("rule", RULES)
def test_evaluation_batches_do_not_change_a_run(tmp_path, rule):
    """256 is a multiple of the 32 images that the rule takes at once, and 100 is not."""
    runs = [run_small(experiment(tmp_path / str(size), rule, size=size))[0] for size in (256, 100)]
    one, other = (pd.read_csv(run / "rounds.csv") for run in runs)
    assert one["target_loss"].to_numpy() == pytest.approx(other["target_loss"].to_numpy(), rel=1e-5)
    model = fedsim.load(runs[1], "last")
    _, table = evaluate_arrays(model, "rot45", *load_target(model.experiment.data, "rot45"))
    assert (table["label"] == table["predicted"]).mean() == pytest.approx(other["target_accuracy"].iloc[-1], abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_smaller_evaluation_batch_gives_the_same_run(tmp_path, rule):
    """The rule then takes its own number of images, more than the evaluation of other rules would."""
    runs = [run_small(experiment(tmp_path / str(size), rule, size=size))[0] for size in (32, 16)]
    one, other = (pd.read_csv(run / "rounds.csv") for run in runs)
    assert one["target_loss"].to_numpy() == pytest.approx(other["target_loss"].to_numpy(), rel=1e-5)


def test_images_of_one_call():
    assert [TsmoBN().pass_size(wanted) for wanted in (256, 100, 64, 16)] == [256, 64, 64, 64]
    assert EvalMode().pass_size(100) == 100


@pytest.mark.parametrize("rule", ["tsmo_bn", "recompute"])
def test_files_of_a_folder_come_in_a_random_order_and_in_the_order_of_the_table(tmp_path, rule, monkeypatch):
    """A folder lists its images class by class; batches of one class would have the statistics of one class."""
    run, _ = run_small(experiment(tmp_path / "run", rule, batch=16))
    model = fedsim.load(run, "last")
    images, labels, indices = load_target(model.experiment.data, "rot45")
    for index in indices:
        folder = tmp_path / "tree" / "scan" / str(labels[index])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[index][0]).save(folder / f"{index}.png")
    _, in_run = evaluate_arrays(model, "rot45", *load_target(model.experiment.data, "rot45"))
    in_run = in_run.set_index(in_run["image"].str.extract(r"\[(\d+)\]")[0])
    files = sorted((tmp_path / "tree").rglob("*.png"))
    seen: list[str] = []
    prepare = model.prepare

    def watched(part):
        seen.extend(file.parent.name for file in part)
        return prepare(part)

    monkeypatch.setattr(model, "prepare", watched)
    _, judged = evaluate(model, labelled_images(tmp_path / "tree", model.classes))
    for table in (judged, predict(model, files)):
        assert table["image"].tolist() == [str(file) for file in files]
        own = in_run.loc[[file.stem for file in files]]
        assert (table["predicted"].to_numpy() == own["predicted"].to_numpy()).mean() > 0.8
    changes = sum(one != other for one, other in itertools.pairwise(seen[: len(files)]))
    assert changes > len(files) / 2


def test_random_alpha_draws_as_before_for_whole_batches():
    """`batch` of the default size: the draws of one call with up to 256 images are those of the layers in turn."""
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.BatchNorm2d(1))
    x = torch.rand(5, 1, 3, 3)
    found = RandomAlpha().begin(net, tuple)(x)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        alpha = torch.rand(5, 1, generator=generator)[:, :, None, None]
        variance, mean = torch.var_mean(x, dim=(2, 3), correction=0, keepdim=True)
        std, std_g = torch.sqrt(variance + 1e-5), torch.tensor(1 + 1e-5).sqrt()
        x = (x - alpha * mean) / (alpha * std + (1 - alpha) * std_g)
    torch.testing.assert_close(found, x, atol=1e-5, rtol=1e-5)
