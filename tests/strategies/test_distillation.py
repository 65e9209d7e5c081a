"""Ensemble distillation on the server."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from image_trees import write_tree
from PIL import Image
from support import numbers, run_small, small_experiment
from torch import nn

from fedsim.common.errors import UserError
from fedsim.data.auxiliary import auxiliary_images, refuse_own_images
from fedsim.data.fingerprint import fingerprint
from fedsim.methods.assembly import build_recipe
from fedsim.runs.conflicts import refuse_other_settings
from fedsim.settings import DataSettings
from fedsim.settings.experiment import Experiment
from fedsim.settings.paths import folders
from strategies.aggregate import weighted_mean
from strategies.refine.ensemble_distillation import (
    EnsembleDistillation,
    batch_positions,
    distillation_loss,
    mean_logits,
)
from strategies.server_round import ServerRound, Update


def logits(*rows):
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


def test_loss_and_teachers_by_hand():
    """The loss has no factor tau^2; equal logits give 0 and no gradient. (4, 0) and (0, 0) give softmax (.8808, .1192),
    not the mean of the probabilities. In training mode teachers normalize by the statistics of the batch."""
    for student, teacher, tau, loss in (((0, 0), (1, 0), 1, 0.120114), ((2, 0), (1, 0), 1, 0.067131),
                                        ((2, 0), (1, 0), 2, 0.026345)):  # fmt: skip
        assert distillation_loss(logits(student), logits(teacher), tau).item() == pytest.approx(loss, abs=1e-6)
    student = logits((3, -1), (0.5, 2))
    loss = distillation_loss(student.detach(), student)
    loss.backward()
    assert (loss.item(), student.grad.abs().max() < 1e-15) == (0, True)
    net = nn.Linear(1, 2)
    states = [{"weight": np.zeros((2, 1), np.float32), "bias": np.array(bias, np.float32)} for bias in ((4, 0), (0, 0))]
    teacher = mean_logits(net, states, [np.arange(3)], lambda part: torch.ones(len(part), 1))
    assert teacher.softmax(1)[0].tolist() == pytest.approx([0.8808, 0.1192], abs=1e-4)
    batches = batch_positions(10, 4, 5, np.random.default_rng(0))
    assert ([len(batch) for batch in batches], len(set(np.concatenate(batches[:2])))) == ([4] * 5, 8)
    net, images = nn.BatchNorm1d(2), torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    state = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    found = [mean_logits(net, [state] * 2, [np.arange(2)], lambda part: images[part], train=on) for on in (True, False)]
    assert found[0].numpy() == pytest.approx(np.array([[-1, -1], [1, 1]]), abs=1e-4)
    assert found[1].allclose(images, rtol=1e-4)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def draw_images(folder, count, start=100):
    return str(write_tree(folder, ["all"], ["all"], count, start))


@pytest.fixture
def server(tmp_path):
    draw_images(tmp_path / "aux", 12)
    rng = np.random.default_rng(0)
    state = {name: value.numpy().copy() for name, value in Small().state_dict().items() if not name.startswith("conv")}

    def moved(value):
        return value + np.abs(rng.normal(size=value.shape)).astype(value.dtype) if value.dtype == np.float32 else value

    updates = [Update(client, 10, {name: moved(value) for name, value in state.items()}) for client in "ab"]
    data = DataSettings(dataset="pacs", image_size=16, cache=str(tmp_path / "cache"), root=str(tmp_path))
    shared = frozenset({"norm.weight", "norm.bias", "head.weight", "head.bias"})
    return ServerRound(1, 5, ["a", "b"], state, updates=updates, parameters=shared, build_net=Small,
                       experiment=Experiment(data=data))  # fmt: skip


def test_distillation_reduces_its_loss_or_does_nothing(server, tmp_path):
    """Nothing is distilled without a folder, with the model of one client, and after T_kd = 30."""
    part = EnsembleDistillation(data=str(tmp_path / "aux"), steps=30, lr=0.05, batch_size=6)
    states = [update.arrays for update in server.updates]
    fused = weighted_mean(states, [1, 1])
    refined = part.refine(fused, server)
    prepared, count = part._images(server)
    teacher, student, before = (
        mean_logits(Small(), own, [np.arange(count)], prepared) for own in (states, [refined] * 2, [fused] * 2)
    )
    assert distillation_loss(teacher, student) < 0.5 * distillation_loss(teacher, before)
    still = {name for name in fused if np.array_equal(refined[name], fused[name])}
    assert still == {"norm.num_batches_tracked", "norm.running_mean", "norm.running_var"}
    moved = dataclasses.replace(part, steps=4, bn="train").refine(fused, server)
    assert not np.array_equal(moved["norm.running_mean"], fused["norm.running_mean"])
    first, again = (dataclasses.replace(part, steps=4, teachers="train").refine(fused, server) for _ in range(2))
    assert not np.array_equal(first["head.weight"], refined["head.weight"])
    np.testing.assert_equal(first, again)
    fused, data = dict(server.updates[0].arrays), str(tmp_path / "aux")
    alone = dataclasses.replace(server, updates=server.updates[:1])
    for part, round in (
        (EnsembleDistillation(), server), (EnsembleDistillation(data=data), dataclasses.replace(server, round=31)),
        (EnsembleDistillation(data=data, rounds=0), alone),
    ):  # fmt: skip
        assert part.refine(fused, round) == fused


def test_images_of_clients_and_target_are_refused(tmp_path):
    """Also where a table names them; a copied file; a copied folder whose original is not here but in the records."""
    tree = write_tree(tmp_path / "images", ("cartoon", "photo", "sketch"), ("cat", "dog"), 4)
    data = DataSettings(dataset="folder", root=str(tree), cache=str(tmp_path / "cache"), image_size=16)
    rows = [",".join(file.relative_to(tree).parts[:2]) + f",{file}" for file in tree.rglob("*.png")]
    (tmp_path / "rows.csv").write_text("\n".join(["domain,label,path", *rows]))
    table = data.model_copy(update={"dataset": "table", "root": str(tmp_path / "rows.csv")})
    aux = draw_images(tmp_path / "aux", 1)
    refuse_own_images(aux, data, {})
    shutil.copy(next((tree / "sketch").rglob("*.png")), f"{aux}/other.png")
    shutil.copytree(tree / "photo", tmp_path / "copy")
    away = data.model_copy(update={"root": str(tmp_path / "nowhere"), "domains": ["photo"], "classes": ["cat", "dog"]})
    for folder, settings, known, said in (
        *((own, data, {}, "neither a client's nor the target's") for own in (tree, tree / "photo" / "dog")),
        (tree / "sketch", table, {}, "is an image of the domain 'sketch'"),
        (aux, data, {}, r"other.* is .* of the domain 'sketch'"),
        (tmp_path / "copy", away, {"photo": fingerprint(data, "photo")}, "the images of 'photo'"),
    ):
        with pytest.raises(UserError, match=said):
            refuse_own_images(str(folder), settings, known)


def test_folder_of_auxiliary_images(tmp_path, monkeypatch):
    """Images are grey for grey data. A relative folder is where fedsim was started, in Flower's engine too."""
    data = DataSettings(cache=str(tmp_path / "cache"), image_size=16)
    (tmp_path / "aux" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for folder, said in (("none", f"no folder {tmp_path}/none"), ("aux", "holds no image")):
        with pytest.raises(UserError, match=said):
            auxiliary_images(folder, data, 3)
    colour = Image.new("RGB", (16, 16), (200, 100, 50))
    colour.save(tmp_path / "aux" / "deep" / "one.png")
    assert auxiliary_images("aux", data, 3).shape == (1, 3, 16, 16)
    for name, value in folders(Experiment()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path / "aux")
    assert abs(int(auxiliary_images("aux", data, 1)[0, 0, 0, 0]) - colour.convert("L").getpixel((0, 0))) <= 1


def test_a_run_distils_and_starts_with_nothing_half_written(tmp_path):
    """The label shows it; if the images' folder is missing, the run stops before its own folder is created."""
    kd = {"data": draw_images(tmp_path / "aux", 8), "steps": 3, "batch_size": 4, "lr": 0.01}
    method, train = {"name": "perada", "ensemble_distillation": kd}, {"rounds": 1, "iterations": 1}
    experiment = small_experiment(tmp_path / "out", method, train=train)
    folder, _ = run_small(experiment)
    assert numbers(folder / "summary.csv")["label"][0].startswith("perada(kd)")
    assert set(numbers(folder / "details.csv").query("quantity == 'distillation_loss'")["name"]) == {"first", "last"}
    shutil.rmtree(tmp_path / "aux")
    draw_images(tmp_path / "aux", 8, start=9)  # other pixels in the same folder, for a finished run
    with pytest.raises(UserError, match=r"other data .auxiliary images: 8 images as before"):
        refuse_other_settings(folder, experiment, build_recipe(experiment))
    assert "distils nothing" in EnsembleDistillation().remark
    assert not EnsembleDistillation(data="images").remark
    gone = {"ensemble_distillation": {"data": str(tmp_path / "none")}}
    with pytest.raises(UserError, match="no folder"):
        run_small(experiment.replace(run={"output": str(tmp_path / "other")}, method=gone))
    assert not (tmp_path / "other").exists()
