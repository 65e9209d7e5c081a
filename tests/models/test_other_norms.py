"""I-BN, DSON and BIN: numbers worked out by hand, and properties."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models.norms import BIN, DSON, IBN
from fedsim.models.norms.bin import BINLayer
from fedsim.models.norms.dson import DSONLayer
from fedsim.models.norms.ibn import IBNLayer, ResidualIBNBlock
from fedsim.models.norms.instance_norm import InstanceNorm2d
from fedsim.models.norms.moments import batch_moments
from fedsim.tensors.kinds import Kind, bn_scope, tensor_kinds


def one_channel(layer, mean, variance, **values):
    """A layer of one channel in eval mode with given running moments and eps 0."""
    state = {**layer.state_dict(), **values}
    state[next(name for name in state if name.endswith("running_mean"))] = torch.tensor([mean])
    state[next(name for name in state if name.endswith("running_var"))] = torch.tensor([variance])
    layer.load_state_dict(state)
    return layer.eval()


# ---------------------------------------------------------------------------------------------------------------- I-BN


def layers_of(net, kind):
    return {name: module for name, module in net.named_modules() if isinstance(module, kind)}


def test_ibn_a_on_resnet(build):
    net = build("resnet18", IBN("a"))
    found = layers_of(net, IBNLayer)
    assert sorted(found) == sorted(f"backbone.layer{s}.{b}.bn1" for s in (1, 2, 3) for b in (0, 1))
    assert found["backbone.layer1.0.bn1"].sizes == (32, 32)
    assert len(layers_of(build("resnet50", IBN("a")), IBNLayer)) == 3 + 4 + 6


def test_ibn_a_on_densenet(build):
    found = layers_of(build("densenet121", IBN("a")), IBNLayer)
    assert len(found) == 2 + 4 + 8  # every third of 6, 12 and 24 layers
    first = found["backbone.features.denseblock1.denselayer1.norm1"]
    assert first.sizes == (38, 26)  # 64 channels: floor(0.6 * 64) by batch norm first
    assert not first.instance_first


def test_ibn_halves(trained_bn, images):
    layer = IBNLayer(copy.deepcopy(trained_bn), 2).eval()
    scale, shift = torch.rand(6, 4, 1, 1) + 0.5, torch.randn(6, 4, 1, 1)
    before, after = layer(images), layer(scale * images + shift)
    torch.testing.assert_close(before[:, :2], after[:, :2], atol=2e-3, rtol=0)
    assert not torch.allclose(before[:, 2:], after[:, 2:], atol=0.1)
    torch.testing.assert_close(before[:, 2:], trained_bn.eval()(images)[:, 2:])
    torch.testing.assert_close(layer(images[:1]), before[:1])
    torch.testing.assert_close(layer.train()(images)[:, :2], before[:, :2])
    constant = layer(torch.full((2, 4, 3, 3), 7.0))[:, :2]
    beta = trained_bn.bias[:2].view(1, 2, 1, 1).expand(2, 2, 3, 3)
    torch.testing.assert_close(constant, beta, atol=1e-3, rtol=0)


def test_ibn_order_of_densenet(trained_bn, images):
    layer = IBNLayer(copy.deepcopy(trained_bn), 1, instance_first=False).eval()
    torch.testing.assert_close(layer(images)[:, :3], trained_bn.eval()(images)[:, :3])
    expected = F.instance_norm(images, weight=trained_bn.weight, bias=trained_bn.bias)[:, 3:]
    torch.testing.assert_close(layer(images)[:, 3:], expected)


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
def test_ibn_b_on_resnet(build, backbone):
    plain, net = build(backbone), build(backbone, IBN("b"))
    assert isinstance(net.backbone.bn1, InstanceNorm2d)
    found = layers_of(net, ResidualIBNBlock)
    assert [name.rsplit(".", 1)[0] for name in found] == ["backbone.layer1", "backbone.layer2"]
    assert len(layers_of(net, nn.BatchNorm2d)) == len(layers_of(plain, nn.BatchNorm2d)) - 1
    names = set(plain.state_dict()) - set(net.state_dict())
    assert names == {f"backbone.bn1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    block, x = net.backbone.layer2[-1].eval(), torch.rand(2, net.backbone.layer2[-1].inorm.num_features, 4, 4)
    plain_block = plain.backbone.layer2[-1].eval()
    before_relu = []
    handle = plain_block.relu.register_forward_pre_hook(lambda module, args: before_relu.append(args[0].clone()))
    plain_block(x)
    handle.remove()
    torch.testing.assert_close(block(x), F.instance_norm(before_relu[-1]).relu())


def test_ibn_refusals(build):
    with pytest.raises(UserError, match="ResNets only"):
        build("densenet121", IBN("b"))
    with pytest.raises(UserError, match="'a' or 'b'"):
        build("resnet18", IBN("c"))


def test_ibn_on_the_digits_network(build):
    net = build("digits-cnn-bn", IBN("a"), size=28)
    assert isinstance(net.backbone.norm1, IBNLayer)
    assert isinstance(net.backbone.norm2, nn.BatchNorm2d)
    assert isinstance(build("digits-cnn-bn", IBN("b"), size=28).backbone.norm1, InstanceNorm2d)


# ---------------------------------------------------------------------------------------------------------------- DSON


def test_dson_mixes_moments_not_outputs():
    layer = one_channel(DSONLayer(nn.BatchNorm2d(1, eps=0)), 0.0, 3.0)
    y = layer(torch.tensor([1.0, 3.0]).view(1, 1, 1, 2))  # instance mean 2, variance 1
    assert y.flatten()[1].item() == pytest.approx(1.414214, abs=1e-6)  # XAN would give 1.366025


@pytest.mark.parametrize("training", [True, False])
def test_dson_ends_are_instance_and_batch_norm(trained_bn, images, training):
    layer = DSONLayer(copy.deepcopy(trained_bn)).train(training)
    plain = trained_bn.train(training)
    for theta in (layer.theta_mean, layer.theta_var):
        theta.data = torch.tensor([200.0, -200.0])
    expected = F.instance_norm(images, weight=plain.weight, bias=plain.bias)
    torch.testing.assert_close(layer(images), expected)
    layer = DSONLayer(copy.deepcopy(trained_bn)).train(training)
    for theta in (layer.theta_mean, layer.theta_var):
        theta.data = torch.tensor([-200.0, 200.0])
    torch.testing.assert_close(layer(images), plain(images))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(layer, name), getattr(plain, name))


def test_batch_moments_from_instance_moments(images):
    mean, variance = batch_moments(images.mean((2, 3)), images.var((2, 3), correction=0))
    torch.testing.assert_close(mean, images.mean((0, 2, 3)))
    torch.testing.assert_close(variance, images.var((0, 2, 3), correction=0))


def test_dson_is_personal(build):
    net = build("digits-cnn-bn", DSON(), size=28)
    layer = net.backbone.norm1
    assert set(bn_scope(layer)) == set(layer.state_dict())
    assert tensor_kinds(layer)["theta_mean"] is Kind.BN_AFFINE
    channelwise = build("digits-cnn-bn", DSON(channelwise=True), size=28).backbone.norm2
    assert channelwise.theta_var.shape == (2, *channelwise.weight.shape)


# ----------------------------------------------------------------------------------------------------------------- BIN


def test_bin_hand_computed():
    # x = 1 with instance mean 2, variance 1: x_I = -1; running mean -1, variance 1: x_B = 2
    values = {"rho": torch.tensor([0.25]), "bn.weight": torch.tensor([2.0]), "bn.bias": torch.tensor([1.0])}
    layer = one_channel(BINLayer(nn.BatchNorm2d(1, eps=0)), -1.0, 1.0, **values)
    assert layer(torch.tensor([1.0, 3.0]).view(1, 1, 1, 2)).flatten()[0].item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_fresh_bin_is_batch_norm(trained_bn, images, training):
    layer, plain = BINLayer(copy.deepcopy(trained_bn)).train(training), trained_bn.train(training)
    torch.testing.assert_close(layer(images), plain(images))
    torch.testing.assert_close(layer.bn.running_var, plain.running_var)
    assert layer.bn.num_batches_tracked == plain.num_batches_tracked


def test_bin_without_gate_is_instance_norm(trained_bn, images):
    layer = BINLayer(trained_bn).eval()
    nn.init.zeros_(layer.rho)
    scale, shift = torch.rand(6, 4, 1, 1) + 0.5, torch.randn(6, 4, 1, 1)
    torch.testing.assert_close(layer(images), layer(scale * images + shift), atol=2e-3, rtol=0)
    expected = F.instance_norm(images, weight=trained_bn.weight, bias=trained_bn.bias)
    torch.testing.assert_close(layer(images), expected)


def test_bin_gate_is_clipped_shared_and_fast(build):
    net = build("digits-cnn-bn", BIN(), size=28)
    layer = net.backbone.norm1
    layer.rho.data[:2] = torch.tensor([1.3, -0.2])
    layer.after_step()
    assert layer.rho[:2].tolist() == [1.0, 0.0]
    assert layer.lr_scales == {"rho": 10.0}
    assert tensor_kinds(layer)["rho"] is Kind.WEIGHT
    assert "rho" not in bn_scope(layer)


@pytest.mark.parametrize(("outside", "inside"), [(1.3, 1.0), (-0.2, 0.0)])
@pytest.mark.parametrize("training", [True, False])
def test_bin_gate_outside_of_its_range_acts_as_at_the_bound(trained_bn, images, training, outside, inside):
    """A server that goes beyond the clients' mean can send such a gate; the clip after a client's step ends it."""
    layer = BINLayer(trained_bn).train(training)
    nn.init.constant_(layer.rho, inside)
    expected = layer(images)
    nn.init.constant_(layer.rho, outside)
    torch.testing.assert_close(layer(images), expected)
    layer.after_step()
    assert layer.rho.unique().tolist() == [inside]
    layer.train()(images).square().sum().backward()
    assert layer.rho.grad.abs().min() > 0  # at the bound there is a gradient, which can lead it back inside


@pytest.mark.parametrize("norm", [IBN("a"), IBN("b"), DSON(), DSON(channelwise=True), BIN()])
def test_small_images_train(build, norm):
    y = build("resnet18", norm)(torch.randn(2, 3, 28, 28))
    y.sum().backward()
    assert y.isfinite().all()


@pytest.mark.parametrize("make", [DSONLayer, BINLayer])
def test_gradients(trained_bn, make):
    layer = make(trained_bn).double()
    parameters = dict(layer.named_parameters())
    if "rho" in parameters:
        nn.init.constant_(layer.rho, 0.3)
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64, requires_grad=True)

    def run(x, *values):
        frozen = {name: value.clone() for name, value in layer.named_buffers()}
        return torch.func.functional_call(layer, {**dict(zip(parameters, values, strict=True)), **frozen}, (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters.values()))


@pytest.mark.parametrize("make", [DSONLayer, BINLayer])
def test_one_value_per_channel_is_refused(trained_bn, make):
    with pytest.raises(ValueError, match="more than one value"):
        make(trained_bn)(torch.randn(1, 4, 1, 1))
