"""A loaded model is moved to another device or type as a whole, whatever its inference rule keeps."""

import pytest
import torch
from untrained_run import untrained_run

import fedsim
from fedsim.common.errors import UserError
from fedsim.export.files import export

INDUCTIVE = ("eval_mode", "fixed_alpha", "iabn", "mix_norm", "random_alpha")
METHODS = {rule: {"name": "fedavg", "infer": rule} for rule in INDUCTIVE} | {"fedig-a": "fedig-a", "fedsr": "fedsr"}


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_an_inductive_rule_moves_with_the_model(tmp_path, method):
    model, images = fedsim.load(untrained_run(tmp_path / "seed0", METHODS[method])), torch.rand(3, 1, 28, 28)
    before = model(images)
    moved = model.double()(images.double())
    torch.testing.assert_close(moved.float(), before.float(), atol=1e-4, rtol=0)


def test_a_rule_with_fixed_views_is_exported(tmp_path):
    model = fedsim.load(untrained_run(tmp_path / "seed0", METHODS["mix_norm"]))
    assert export(model, "torch", tmp_path / "model.pt2")[0] < 1e-4


def test_a_rule_that_draws_is_not_exported(tmp_path, capfd):
    model = fedsim.load(untrained_run(tmp_path / "seed0", METHODS["random_alpha"]))
    with pytest.raises(UserError, match="RandomAlpha draws numbers at every prediction, which no file holds"):
        export(model, "torch", tmp_path / "model.pt2")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("rule", ["tsmo_bn", "recompute"])
@torch.inference_mode()
def test_a_transductive_rule_adapts_again(tmp_path, rule):
    model = fedsim.load(untrained_run(tmp_path / "seed0", {"name": "fedavg", "infer": rule}))
    images = torch.rand(4, 1, 28, 28)
    before = model.adapt([images])(images)
    model.double()
    with pytest.raises(UserError, match="uses images of the unseen domain first; call adapt"):
        model(images.double())
    moved = model.adapt([images.double()])(images.double())
    torch.testing.assert_close(moved.float(), before, atol=1e-4, rtol=0)
