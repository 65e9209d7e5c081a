"""Backbones: reference sizes, image sizes, seeds and weight files."""

import urllib.error

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models import build_model
from fedsim.models.backbones import BACKBONES
from fedsim.models.norms import BIN, DSON, IBN, XAN, BatchNorm
from fedsim.settings import ModelSettings
from fedsim.tensors.kinds import Kind, bn_scope, tensor_kinds


@pytest.mark.parametrize(("backbone", "trainable", "layers", "channels"), [
    ("resnet18", 11_176_512, 20, 4_800), ("resnet50", 23_508_032, 53, 26_560), ("densenet121", 6_953_856, 121, 41_824),
])  # fmt: skip
def test_reference_sizes(build, backbone, trainable, layers, channels):
    net = build(backbone)
    assert sum(parameter.numel() for parameter in net.backbone.parameters() if parameter.requires_grad) == trainable
    assert sum(p.numel() for p in net.head.parameters()) == 7 * (net.feature_dim + 1)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert (len(norms), sum(norm.num_features for norm in norms)) == (layers, channels)
    kinds, state = tensor_kinds(net), net.state_dict()
    assert sum(state[name].numel() for name, kind in kinds.items() if kind is Kind.BN_STATISTICS) == 2 * channels
    assert sum(kind is Kind.COUNTER for kind in kinds.values()) == layers


@pytest.mark.parametrize(("backbone", "bn_entries", "entries"), [("resnet18", 100, 122), ("resnet50", 265, 320)])
def test_bn_entries(build, backbone, bn_entries, entries):
    net = build(backbone)
    assert (len(bn_scope(net)), len(net.state_dict())) == (bn_entries, entries)
    assert bn_scope(net, "xan") == []


def test_fedig_network(build):
    net = build("resnet18", bottleneck=256)
    assert sum(p.numel() for p in net.parameters()) == 11_310_151
    kinds, state = tensor_kinds(net), net.state_dict()
    assert sum(state[name].numel() for name, kind in kinds.items() if kind is Kind.BN_STATISTICS) == 10_112
    assert sum(kind is Kind.COUNTER for kind in kinds.values()) == 21
    x = torch.randn(2, 3, 32, 32)
    assert net.feature_dim == net.features(x).shape[1] == 256
    assert torch.equal(net.eval()(x), net.head(net.features(x)))


SIZES = [(name, size) for name in ("digits-cnn", "digits-cnn-bn", "resnet18") for size in (28, 65, 224)]
SIZES += [("alexnet", size) for size in (28, 62, 63)] + [("densenet121", size) for size in (28, 31, 33)]
SIZES += [("resnet50", 28), ("vit-b-32", 32)]


@pytest.mark.parametrize(("backbone", "size"), SIZES)
def test_forward_at_many_sizes(build, backbone, size):
    with torch.inference_mode():
        for channels in (1, 3):
            net = build(backbone, size=size, channels=channels).eval()
            features = net.features(torch.randn(1, channels, size, size))
            assert features.shape == (1, net.feature_dim)
            assert net.head(features).shape == (1, 7)
            if not backbone.startswith("digits"):
                break  # big nets once


def test_grayscale_equals_repeated_channels(build):
    net = build("resnet18", channels=1).eval()
    x = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(net(x), build("resnet18").eval()(x.repeat(1, 3, 1, 1)))


@pytest.mark.parametrize(("backbone", "size", "shapes"), [
    ("resnet18", 224, [(128, 28, 28), (256, 14, 14), (512, 7, 7)]),
    ("alexnet", 224, [(384, 13, 13), (256, 13, 13), (256, 6, 6)]),
    ("digits-cnn", 28, [(None, 12, 12), (None, 4, 4)]),  # as wide as the network is
    ("densenet121", 64, [(512, 8, 8), (1024, 4, 4), (1024, 2, 2)]),
])  # fmt: skip
def test_levels_are_feature_maps(build, backbone, size, shapes):
    net, found = build(backbone, size=size).eval(), []
    for path in net.levels:
        net.get_submodule(path).register_forward_hook(lambda _module, _args, y: found.append(tuple(y.shape[1:])))
    with torch.inference_mode():
        net(torch.randn(1, 3, size, size))
    widths = [module.out_channels for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert found == [(channels or width, *size) for (channels, *size), width in zip(shapes, widths[-len(shapes) :])]


def test_same_seed_same_model_and_untouched_generator(build):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = build("digits-cnn"), build("digits-cnn", BatchNorm()), build("digits-cnn", seed=1)
    assert torch.equal(torch.rand(3), expected)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.head.weight, other.head.weight)


def test_norm_parts_share_the_initial_weights(build):
    plain, mixed = build("digits-cnn-bn"), build("digits-cnn-bn", XAN())
    assert torch.equal(plain.head.weight, mixed.head.weight)
    assert torch.equal(plain.backbone.conv2.weight, mixed.backbone.conv2.weight)


def test_channels_last_gives_the_same(build):
    net, x = build("digits-cnn-bn", XAN(), size=28), torch.randn(4, 3, 28, 28)
    expected = net(x)
    last = net.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("settings", "channels", "size", "message"), [
    ({"backbone": "resnet19"}, 3, 32, "did you mean 'resnet18'"),
    ({"backbone": "vit-b-16"}, 3, 28, "data.image_size = 28; use 32"),
    ({"backbone": "digits-cnn"}, 3, 14, "at least 16 px"),
    ({"backbone": "digits-cnn"}, 2, 28, "1 or 3 channels"),
    ({"backbone": "digits-cnn", "weights": "imagenet"}, 1, 28, "no ImageNet weights"),
    ({"backbone": "digits-cnn", "weights": "nowhere.pth"}, 1, 28, "no file 'nowhere.pth'"),
])  # fmt: skip
def test_bad_settings_are_one_line(settings, channels, size, message):
    with pytest.raises(UserError, match=message) as raised:
        build_model(ModelSettings(**settings), 7, channels, size)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("norm", [XAN(), IBN(), DSON(), BIN()])
def test_norm_parts_need_batch_norm(build, norm):
    with pytest.raises(UserError, match="needs a backbone with batch norm"):
        build("digits-cnn", norm)
    with pytest.raises(UserError, match="needs a backbone with batch norm"):
        norm.apply(build("digits-cnn"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_local_weights(build, tmp_path, suffix):
    donor, file = build("resnet18", seed=3), tmp_path / ("weights" + suffix)
    own = {name: value.contiguous() for name, value in donor.backbone.state_dict().items()}
    state = {**own, "fc.weight": torch.ones(1000, 512), "fc.bias": torch.ones(1000)}
    (save_file if suffix == ".safetensors" else torch.save)(state, file)
    net = build("resnet18", weights=str(file))
    for name, value in donor.backbone.state_dict().items():
        assert torch.equal(net.backbone.state_dict()[name], value)
    assert torch.equal(net.head.weight, build("resnet18").head.weight)


def test_own_checkpoints_are_read(build, tmp_path):
    donor, file = build("digits-cnn", seed=3), tmp_path / "best.safetensors"
    save_file({name: value.contiguous() for name, value in donor.state_dict().items()}, file)
    net = build("digits-cnn", weights=str(file), bottleneck=8)
    assert torch.equal(net.backbone.conv1.weight, donor.backbone.conv1.weight)


def test_old_densenet_names(build, tmp_path):
    donor, file = build("densenet121", seed=3).backbone.state_dict(), tmp_path / "old.pth"
    for new, old in (("norm1.", "norm.1."), ("norm2.", "norm.2."), ("conv1.", "conv.1."), ("conv2.", "conv.2.")):
        donor = {name.replace(new, old) if "denselayer" in name else name: v for name, v in donor.items()}
    torch.save({name: value for name, value in donor.items() if not name.endswith("num_batches_tracked")}, file)
    net = build("densenet121", weights=str(file))
    assert torch.equal(net.backbone.features.denseblock2.denselayer3.conv2.weight,
                       donor["features.denseblock2.denselayer3.conv.2.weight"])  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [
    (lambda state: state.pop("conv1.weight"), "lacks key 'conv1.weight'"),
    (lambda state: state.update(extra=torch.ones(1)), "unknown key 'extra'"),
    (lambda state: state.update({"conv1.bias": torch.ones(5)}), r"'conv1.bias' has shape \[5\], not \[\d+\]"),
])  # fmt: skip
def test_weights_that_do_not_fit(build, tmp_path, change, message):
    state, file = build("digits-cnn").backbone.state_dict(), tmp_path / "weights.pth"
    change(state)
    torch.save(state, file)
    with pytest.raises(UserError, match=message):
        build("digits-cnn", weights=str(file))


@pytest.mark.parametrize(
    "name", ["bad.safetensors", "bad.pth", "pickled.pth", "list.pth", "table.csv", "a.csv", "empty.pth"]
)
def test_unreadable_weight_files(build, tmp_path, name):
    file = tmp_path / name
    others = {"table.csv": b"round,train_loss\n0,1\n", "a.csv": b"a,b\n", "empty.pth": b""}
    file.write_bytes(others.get(name, b"no weights here"))
    if name == "pickled.pth":
        torch.save(nn.Linear(1, 1), file)
    if name == "list.pth":
        torch.save([torch.ones(1)], file)
    with pytest.raises(UserError, match=name) as raised:
        build("digits-cnn", weights=str(file))
    assert "\n" not in str(raised.value)


def test_failed_download_says_what_to_do(build, monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    with pytest.raises(UserError, match=r"cannot download https://.*resnet18.*set model.weights to the file"):
        build("resnet18", weights="imagenet")


def test_catalog_names_real_weights():
    import torchvision

    for row in BACKBONES.values():
        if "hub" in row.sources:
            enum, entry = row.sources["hub"].args
            assert getattr(torchvision.models, enum)[entry].url.startswith("https://")


def test_vit_positions_fit_another_image_size(build, tmp_path):
    donor, file = build("vit-b-32", size=64).backbone.state_dict(), tmp_path / "vit.safetensors"
    save_file(donor, file)
    net = build("vit-b-32", size=32, weights=str(file))
    assert net.backbone.encoder.pos_embedding.shape == (1, 2, 768)
    assert net.levels == ()
