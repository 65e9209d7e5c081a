"""A loaded model is moved to another device or type as a whole, whatever its inference rule keeps."""

import pytest
import torch
from untrained_run import untrained_run

import fedsim
from fedsim.common.errors import UserError
from fedsim.export.files import export

INDUCTIVE = ("fixed_alpha", "iabn", "mix_norm", "random_alpha")
METHODS = {rule: {"name": "fedavg", "infer": rule} for rule in INDUCTIVE} | {"fedsr": "fedsr"}
METHODS["mix_norm"] |= {"mix_norm": {"views": 2}}


@pytest.mark.parametrize("method", METHODS)
def test_an_inductive_rule_moves_with_the_model(tmp_path, capfd, method):
    """One that draws is not exported."""
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
    moved = model.adapt([images.double()])(images.double())
    torch.testing.assert_close(moved.float(), before, atol=1e-4, rtol=0)
