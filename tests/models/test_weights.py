"""Initial weights: files of each kind, published ones, those of a package, and what is refused in one line."""

import functools
import re
import urllib.error

import pytest
import torch
import torchvision
from networks import build, saved
from torch import nn
from torchvision.models import VisionTransformer

from fedsim.common.errors import UserError
from fedsim.models.norms.placement import batch_norm_paths
from fedsim.models.weights import in_order


def test_a_file_of_torchvision_is_read_and_its_classifier_left_out(tmp_path):
    """timm's ResNet reads the same file, and has the same stages and features."""
    donor = build("resnet18", seed=3).eval()
    own = donor.backbone.state_dict()
    file = saved(tmp_path / "w.safetensors", own | {"fc.weight": torch.ones(1000, 512), "fc.bias": torch.ones(1000)})
    net = build("resnet18", weights=file)
    assert all(torch.equal(net.backbone.state_dict()[name], value) for name, value in own.items())
    assert torch.equal(net.head.weight, build("resnet18").head.weight)
    timm, x = build("timm:resnet18", weights=file).eval(), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(timm.backbone(x), donor.backbone(x), rtol=1e-4, atol=1e-5)
    for stage in (1, 2, 3, 4):
        assert batch_norm_paths(timm, [stage], False) == batch_norm_paths(donor, [stage], False)


def test_old_densenet_names_and_no_counters(tmp_path):
    state, file = build("densenet121", seed=3).backbone.state_dict(), tmp_path / "old.pth"
    old = {re.sub(r"(denselayer.*)(norm|conv)([12])", r"\1\2.\3", name): value for name, value in state.items()}
    torch.save({name: value for name, value in old.items() if not name.endswith("num_batches_tracked")}, file)
    layer = build("densenet121", weights=str(file)).backbone.features.denseblock2.denselayer3
    assert torch.equal(layer.conv2.weight, old["features.denseblock2.denselayer3.conv.2.weight"])


@pytest.mark.parametrize(("name", "content", "message"), [
    ("w.pth", lambda state: state.pop("conv1.weight"), "lacks key 'conv1.weight'"),
    ("w.pth", lambda state: state.update(extra=torch.ones(1)), "unknown key 'extra'"),
    ("w.pth", lambda state: state.update({"conv1.bias": torch.ones(5)}), r"'conv1.bias' has shape \[5\], not \[\d+\]"),
    *((name, content, name) for name, content in (
        ("bad.safetensors", b"no weights"), ("bad.pth", b"no weights"), ("table.csv", b"round,train_loss\n0,1\n"),
        ("empty.pth", b""), ("pickled.pth", nn.Linear(1, 1)), ("list.pth", [torch.ones(1)]))),
])  # fmt: skip
def test_files_that_are_not_the_weights(tmp_path, name, content, message):
    state, file = build("digits-cnn").backbone.state_dict(), tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif name == "w.pth":
        content(state)
        torch.save(state, file)
    else:
        torch.save(content, file)
    with pytest.raises(UserError, match=message) as raised:
        build("digits-cnn", weights=str(file))
    assert "\n" not in str(raised.value)


def test_failed_download_says_what_to_do(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    with pytest.raises(UserError, match=r"cannot download https://.*resnet18.*set model.weights to the file"):
        build("resnet18", weights="imagenet")


@pytest.mark.parametrize(("backbone", "path", "shape"), [
    ("vit-b-32", "encoder.pos_embedding", (1, 1 + 1, 768)), ("timm:vit_tiny_patch16_224", "pos_embed", (1, 1 + 4, 192)),
])  # fmt: skip
def test_positions_of_transformers_fit_another_image_size(tmp_path, monkeypatch, backbone, path, shape):
    small = functools.partial(VisionTransformer, patch_size=32, num_layers=1, num_heads=1, hidden_dim=768, mlp_dim=8)
    monkeypatch.setattr(torchvision.models, "vit_b_32", lambda weights, image_size: small(image_size))
    donor = build(backbone, size=64, options={}).backbone.state_dict()
    net = build(backbone, size=32, weights=saved(tmp_path / "vit.safetensors", donor))
    assert net.backbone.get_parameter(path).shape == shape


def test_entries_in_order_are_checked():
    own = {"a": torch.zeros(2), "b": torch.zeros(3)}
    stored = {"x": torch.ones(2), "y": torch.ones(3), "fc.weight": torch.ones(1), "fc.bias": torch.ones(1)}
    assert list(in_order(stored, own, "a file")) == ["a", "b"]
    with pytest.raises(UserError, match=r"'y' has shape \[4\], 'b' has \[3\]"):
        in_order({**stored, "y": torch.ones(4)}, own, "a file")
    with pytest.raises(UserError, match="has 3 entries, and the backbone with a classifier has 4"):
        in_order({name: stored[name] for name in ("x", "y", "fc.bias")}, own, "a file")
