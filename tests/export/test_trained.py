"""A finished run's model is loaded, evaluated, exported and described."""

import functools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from support import interrupt, run_small, small_experiment
from typer.testing import CliRunner

import fedsim
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.data import load_target
from fedsim.export.features import plot_features
from fedsim.export.files import WRITERS, export
from fedsim.export.inference import Labelled, evaluate, evaluate_arrays, labelled_images, predict
from fedsim.runs.checkpoint import write_arrays
from fedsim.runs.workspace import close_workspaces

FEW = {"data": {"domains": ["rot0", "rot15", "rot45"]}, "train": {"rounds": 2}}
METHODS = {
    "fedavg": "fedavg",
    "gperxan": "gperxan",
    "fedig-a": "fedig-a",  # the zero-shot adapter's rule
    "fedsr": "fedsr",  # the mean over draws of the representation
    "copa": "copa",  # the mean over the heads of all clients
    "own-norms": {"name": "fedbn", "infer": "ensemble_of_local_bn"},
    "silobn": {"name": "silobn", "infer": "recompute"},  # transductive
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    @functools.cache
    def run(name):
        close_workspaces()
        folder, _ = run_small(small_experiment(tmp_path_factory.mktemp(name), METHODS[name], **FEW))
        close_workspaces()
        return folder

    return run


@pytest.fixture
def copied(runs, tmp_path):
    return shutil.copytree(runs("fedavg"), tmp_path / "seed0")


def said_by(verb, folder):
    shown = CliRunner().invoke(app, [verb, str(folder)])
    assert shown.exit_code == 0
    return " ".join(shown.output.split())


def target_of(model):
    return load_target(model.experiment.data, model.experiment.run.target)


@pytest.mark.parametrize("method", METHODS)
def test_loaded_model_has_the_recorded_accuracy(runs, method):
    """Transforms, weights and inference rule are the run's: both files give the recorded accuracy on the target."""
    summary = pd.read_csv(runs(method) / "summary.csv").iloc[0]
    for which, column in (("best", "best_validation_target_accuracy"), ("last", "last_target_accuracy")):
        model = fedsim.load(runs(method), which)
        measures, table = evaluate_arrays(model, "rot45", *target_of(model))
        assert measures["accuracy"][0] == pytest.approx(summary[column], abs=1e-12)
        assert len(table) == measures["images"][0] == len(target_of(model)[2])


def test_clients_tensors_of_a_rule(runs, tmp_path):
    """They move with the module, belong to the round of their model, and a run without them says what to do."""
    model, images = fedsim.load(runs("copa")), torch.rand(3, 1, 28, 28)
    single = model(images)
    torch.testing.assert_close(model.double()(images.double()).float(), single, atol=1e-4, rtol=0)
    assert {tensor.dtype for own in model.own for tensor in own.values()} == {torch.float64}
    assert not torch.equal(model.own[0]["head.weight"], model.own[1]["head.weight"])
    folder = shutil.copytree(runs("copa"), tmp_path / "seed0")
    write_arrays(folder / "best.safetensors", load_file(folder / "last.safetensors"), {"round": "9"})
    with pytest.raises(UserError, match=r"is of round \d, and best.safetensors of round 9; finish the run"):
        fedsim.load(folder)
    shutil.rmtree(folder / "inference")
    with pytest.raises(UserError, match="does not hold the clients' tensors of the bank 'heads'"):
        fedsim.load(folder)


def test_entries_after_a_kill(runs, tmp_path):
    """A run that was killed between the checkpoint of its best round and these files writes them when it continues."""
    best = int(pd.read_csv(runs("copa") / "summary.csv")["best_validation_round"][0])
    other = small_experiment(tmp_path, "copa", **FEW)
    broken = interrupt(other, best)
    shutil.rmtree(broken / "inference")
    close_workspaces()
    run_small(other)
    for which in ("best", "last"):
        files = [folder / "inference" / f"{which}.safetensors" for folder in (runs("copa"), broken)]
        np.testing.assert_equal(*map(load_file, files))


def test_folder_of_images(runs, tmp_path):
    """Grey PNG files give the same as arrays, for one domain or several; the metrics are computed by hand."""
    model = fedsim.load(runs("fedavg"))
    images, labels, tested = target_of(model)
    for index in tested[::5][:12]:
        folder = tmp_path / "scan" / str(labels[index])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[index][0]).save(folder / f"{index}.png")
    measures, table = evaluate(model, labelled_images(tmp_path, model.classes))
    indices = [int(name.rsplit("/", 1)[1].removesuffix(".png")) for name in table["image"]]
    expected = model(torch.from_numpy(np.ascontiguousarray(images[indices]))).softmax(1).numpy()
    np.testing.assert_allclose(table[[f"p({name})" for name in model.classes]].to_numpy(), expected, atol=1e-6)
    assert measures["domain"].tolist() == ["scan"]
    files = sorted((tmp_path / "scan").rglob("*.png"))[:3]
    assert measures["accuracy"][0] == np.mean(table["label"] == table["predicted"])
    recalls = [np.mean(group["predicted"] == label) for label, group in table.groupby("label")]
    assert measures["balanced_accuracy"][0] == pytest.approx(np.mean(recalls))
    marked = [Labelled(name, files, labels[tested][:3]) for name in ("rot0", "rot45", "elsewhere")]
    rows = evaluate(model, marked)[0].set_index("domain")
    assert rows["images"].to_dict() == {"rot0 (trained)": 3, "rot45": 3, "elsewhere": 3, "all": 6}  # the unseen ones
    alone = evaluate(model, labelled_images(tmp_path / "scan", model.classes))[0]
    assert alone["accuracy"][0] == measures["accuracy"][0]


@pytest.mark.parametrize(("method", "format"), [
    ("fedsr", "torch"), ("copa", "onnx"), pytest.param("fedig-a", "onnx", marks=pytest.mark.slow),
])  # fmt: skip
def test_export(runs, tmp_path, method, format):
    """In another runtime the file gives the original's logits for the images that `prepare` returns."""
    model, file = fedsim.load(runs(method)), tmp_path / f"model.{format}"
    (tmp_path / ".tmp-killed").mkdir()  # what a killed export has left
    os.utime(tmp_path / ".tmp-killed", (0, 0))
    worst, source = export(model, format, file)
    assert (worst < 1e-4, source) == (True, "8 images of rot45")
    images, _, indices = target_of(model)
    batch = model.prepare([Image.fromarray(images[index][0]) for index in indices[:5]])
    np.testing.assert_array_equal(batch, images[indices[:5]].astype(np.float32) / 255)
    if format == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"images": batch.numpy()})
        assert json.loads(session.get_modelmeta().custom_metadata_map["fedsim.classes"]) == list(model.classes)
    else:
        found = torch.export.load(file).module()(batch).detach().numpy()
    np.testing.assert_allclose(found, model(batch).numpy(), rtol=1e-4, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_wrong_export_is_not_written(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(WRITERS, "torch", lambda *_: lambda batch: np.zeros((len(batch), 10)))
    with pytest.raises(UserError, match=r"differs from the original by .* not written"):
        export(fedsim.load(runs("fedavg")), "torch", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("make", "message"), [
    *((lambda folder, read=read: read(folder / "nowhere"), "holds no best.safetensors; name the folder of one run")
      for read in (fedsim.load, lambda run: plot_features(run, run))),
    (lambda folder: fedsim.load(folder, "bets"), "did you mean 'best'"),
    (lambda folder: export(fedsim.load(folder), "onxx", folder / "x"), "the known formats are onnx, torch"),
    (lambda folder: export(fedsim.load(folder), "torch", folder), r"--output .* is a folder; name a file in it"),
    (lambda folder: predict(fedsim.load(folder), [folder / "no.png"]), r"no image .*no\.png: no such file"),
    (lambda folder: predict(fedsim.load(folder), [folder]), r"a folder; name its files, e\.g\. .*/\*"),
    (lambda folder: labelled_images(folder, ("cat", "dog")), "no folder of images with the name of a class"),
    (lambda folder: labelled_images(folder / "no", ("cat", "dog")), "no folder"),
])  # fmt: skip
def test_bad_input_is_one_line(runs, make, message):
    with pytest.raises(UserError, match=rf"\A.*{message}.*\Z"):
        make(runs("fedavg"))


OTHER = "B has images, but no folder that is called like a class of the model; its classes are cat"


@pytest.mark.parametrize(("place", "said"), [
    *((f"B/{name}", OTHER) for name in ("katze/0.png", "0.png", "site/cat/0.png")),
    ("A/god/0.png", "god is not called like a class of the model; its classes are cat, dog"),
])  # fmt: skip
def test_folders_with_other_names_are_named(tmp_path, place, said):
    """Without a word the domain would be missing from the table; a folder without images is no domain."""
    for file in ("A/cat/0.png", "A/dog/0.png", "notes/a.txt", "empty/x/.hidden.png"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    [found] = labelled_images(tmp_path, ("cat", "dog"))
    assert (found.domain, len(found.files)) == ("A", 2)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_bytes(b"")
    with pytest.raises(UserError, match=rf"\A.*{said}.*\Z"):
        labelled_images(tmp_path, ("cat", "dog"))


def test_evaluation_on_other_images_than_the_run_s_is_said(copied):
    assert "not the images" not in said_by("evaluate", copied)
    record = json.loads((copied / "environment.json").read_text())
    record["data"]["rot45"]["content"] = "other"
    (copied / "environment.json").write_text(json.dumps(record))
    assert "not the images of the run (rot45: 1,000 images as before, but other" in said_by("evaluate", copied)


def test_a_run_that_has_not_finished_is_said(copied, monkeypatch):
    (copied / "summary.csv").unlink()
    settings = (copied / "experiment.toml").read_text()
    (copied / "experiment.toml").write_text(settings.replace("rounds = 2", "rounds = 20"))
    monkeypatch.setattr("fedsim.export.features.plot_features", lambda run, *more: [run, run])
    said = "the run has not finished: this is the best of 2 of 20 rounds"
    with pytest.warns(UserWarning, match=said):
        assert fedsim.load(copied).remark == said
    assert fedsim.load(copied, "last").remark == ""
    assert said in said_by("features", copied)


def test_a_process_that_exported_a_model_still_forks_processes_that_train():
    """In a process of its own, whose first backward pass comes after the trace."""
    program = """
import os, torch
from fedsim.export import files
class Model(torch.nn.Linear):
    doubt = None
files._program(Model(2, 2), torch.zeros(3, 2))
torch.ones(1, requires_grad=True).sum().backward()
if not (child := os.fork()):
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        os._exit(1)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
