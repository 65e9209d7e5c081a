"""XAN, I-BN, DSON and BIN: numbers worked out by hand, their definitions, and where they are in networks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import outline
from safetensors.numpy import load_file
from support import run_small, tiny_experiment
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from fedsim.models.norms import BIN, DSON, IBN, XAN, FreezeBn
from fedsim.models.norms.bin import BINLayer
from fedsim.models.norms.dson import DSONLayer
from fedsim.models.norms.ibn import IBNLayer, ResidualIBNBlock
from fedsim.models.norms.instance_norm import InstanceNorm2d
from fedsim.models.norms.xan import XANLayer
from fedsim.tensors.kinds import Kind, bn_scope, tensor_kinds

close = torch.testing.assert_close
H = torch.tensor([[1.0, 3.0], [5.0, 7.0]]).view(2, 1, 1, 2)


def test_xan_on_numbers_also_with_a_large_offset(trained_bn):
    layer = XANLayer(nn.BatchNorm2d(1))
    close(layer(H).view(2, 2), torch.tensor([[-1.170817, 0.276391], [-0.276391, 1.170817]]), atol=2e-6, rtol=0)
    close(layer.bn.running_mean, torch.tensor([0.4]))
    close(layer.bn.running_var, torch.tensor([1.566667]))
    assert layer.bn.num_batches_tracked == 1
    layer = XANLayer(nn.BatchNorm2d(1, eps=0))
    exact = torch.tensor([[-1.170820, 0.276393], [-0.276393, 1.170820]])
    close(copy.deepcopy(layer)(H).view(2, 2), exact, atol=2e-6, rtol=0)
    close(layer.eval()(H).view(2, 2), torch.tensor([[0.0, 2.0], [2.0, 4.0]]))
    assert layer.bn.num_batches_tracked == 0
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 1000
    single, double = XANLayer(copy.deepcopy(trained_bn)), XANLayer(trained_bn).double()
    close(single(x.float()).double(), double(x), atol=2e-3, rtol=0)  # the input's own rounding
    close(single.bn.running_var.double(), double.bn.running_var, rtol=1e-5, atol=0)


def xan(layer, x):
    w_bn, w_in = torch.softmax(torch.stack((layer.s_bn, layer.s_in)), 0)
    return w_in * F.instance_norm(x, weight=layer.inorm.weight, bias=layer.inorm.bias) + w_bn * layer.bn(x)


def dson(layer, x):
    """Means and variances are mixed, each by its own weights."""
    mean, variance = x.mean((2, 3), keepdim=True), x.var((2, 3), correction=0, keepdim=True)
    means = x.mean((0, 2, 3)) if layer.training else layer.running_mean.clone()
    variances = x.var((0, 2, 3), correction=0) if layer.training else layer.running_var.clone()
    F.batch_norm(x, layer.running_mean, layer.running_var, training=layer.training)  # which updates the statistics
    layer.num_batches_tracked += layer.training
    of_variance = layer.theta_mean if layer.theta_var is None else layer.theta_var
    (m, n), (v, w) = torch.softmax(layer.theta_mean, 0), torch.softmax(of_variance, 0)
    mu, var = m * mean + n * means[:, None, None], v * variance + w * variances[:, None, None]
    return (x - mu) / torch.sqrt(var + layer.eps) * layer.weight[:, None, None] + layer.bias[:, None, None]


def test_dson_with_one_weight_by_hand():
    """Instance mean 2 and variance 1, running 0 and 3, w = 3/4: (3 - 1.5) / sqrt(.75 + .75); of two, w_v is 1/2."""
    x = torch.tensor([[[[1.0, 3.0]]]])
    shared, apart = DSONLayer(nn.BatchNorm2d(1), shared=True), DSONLayer(nn.BatchNorm2d(1))
    for layer, expected in ((shared, 1.5 / 1.5**0.5), (apart, 1.5 / 2**0.5)):
        layer.running_var.fill_(3.0)
        layer.theta_mean.data = torch.tensor([3.0, 1.0]).log()
        assert layer.eval()(x)[0, 0, 0, 1].item() == pytest.approx(expected, abs=1e-5)
    assert "theta_var" not in shared.state_dict()


def gated(layer, x):
    by_batch = layer.bn(x)
    by_instance = F.instance_norm(x, weight=layer.bn.weight, bias=layer.bn.bias)
    rho = layer.rho[:, None, None]
    return rho * by_batch + (1 - rho) * by_instance


def compiled(layer, x):
    """The layer as the compiler sees it, which must be one program: each further one takes as long as the layer."""
    return torch.compile(layer, backend="eager", fullgraph=True)(x)


LAYERS = [(XANLayer, xan), (lambda bn: XANLayer(bn, in_init="copy_bn"), xan), (DSONLayer, dson), (BINLayer, gated),
          (lambda bn: DSONLayer(bn, shared=True), dson),
          (XANLayer, compiled), (DSONLayer, compiled), (BINLayer, compiled),
          (XANLayer, XANLayer.by_branches)]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("make", "definition"), LAYERS)
def test_layers_are_their_definitions_with_gradients(trained_bn, images, training, layout, make, definition):
    fused = make(trained_bn).double().train(training)
    for name, value in fused.named_parameters():
        if name in ("s_in", "theta_mean", "theta_var", "rho"):
            value.data.copy_(torch.linspace(0.2, 1.9 if "var" in name else 0.9, value.numel()).view_as(value))
    plain, weight, results = copy.deepcopy(fused), torch.randn(images.shape, dtype=torch.float64), []
    for layer, forward in ((fused, lambda layer, x: layer(x)), (plain, definition)):
        x = images.double().contiguous(memory_format=layout).requires_grad_()
        y = forward(layer, x)
        (y * weight).sum().backward()
        results.append((y.detach(), x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()))
    for found, expected in zip(*results, strict=True):
        close(found, expected)


@pytest.mark.parametrize("make", [XANLayer, DSONLayer, BINLayer])
def test_gradients_of_gradients(trained_bn, make):
    layer = make(trained_bn).double()
    if make is BINLayer:
        nn.init.constant_(layer.rho, 0.3)
    names, values = zip(*layer.named_parameters())
    x = torch.randn(2, 4, 1, 3, dtype=torch.float64, requires_grad=True)

    def run(x, *given):
        frozen = {name: value.clone() for name, value in layer.named_buffers()}
        return torch.func.functional_call(layer, {**dict(zip(names, given)), **frozen}, (x,))

    assert torch.autograd.gradgradcheck(run, (x, *values))


@pytest.mark.parametrize("make", [XANLayer, DSONLayer, BINLayer])
def test_one_pixel(trained_bn, make):
    layer, x = make(copy.deepcopy(trained_bn)), torch.randn(6, 4, 1, 1, requires_grad=True)
    if make is XANLayer:
        nn.init.constant_(layer.inorm.bias, 2.0)
        close(layer(x), 0.5 * trained_bn(x) + 1.0)
    layer(x).square().sum().backward()
    assert x.grad.isfinite().all()
    with pytest.raises(ValueError, match="more than one value"):
        layer(x[:1])


@pytest.mark.parametrize(("outside", "inside"), [(1.3, 1.0), (-0.2, 0.0)])
def test_a_gate_outside_of_its_range_acts_as_at_the_bound(trained_bn, images, outside, inside):
    """A server that goes beyond the clients' mean can send such a gate; the clip after a client's step ends it."""
    layer = BINLayer(trained_bn)
    nn.init.constant_(layer.rho, inside)
    expected = layer(images)
    nn.init.constant_(layer.rho, outside)
    close(layer(images), expected)
    layer.after_step()
    assert layer.rho.unique().tolist() == [inside]
    layer(images).square().sum().backward()
    assert layer.rho.grad.abs().min() > 0  # at the bound there is a gradient, which can lead it back inside


@pytest.mark.parametrize(("first", "instances"), [(True, slice(0, 2)), (False, slice(3, 4))])
def test_parts_of_an_ibn_layer(trained_bn, images, first, instances):
    """Instance norm of the first two channels, or as on DenseNet of the last one; batch norm of the others."""
    layer = IBNLayer(copy.deepcopy(trained_bn), instances.stop - instances.start, instance_first=first).eval()
    expected = trained_bn.eval()(images).clone()
    own = F.instance_norm(images, weight=trained_bn.weight, bias=trained_bn.bias)[:, instances]
    expected[:, instances] = own
    close(layer(images), expected)
    close(layer.train()(images)[:, instances], own)
    assert layer(images[:, :, :1, :1]).isfinite().all()


@pytest.mark.parametrize(("backbone", "norm", "layers", "channels"), [
    ("resnet50", XAN(), 53, 26_560), ("resnet50", XAN(stages=(1, 2)), 24, 5_056),
    ("densenet121", XAN(stages=(1,), stem=False), 13, 1_888), ("densenet121", XAN(stages=(1,)), 14, 1_952),
])  # fmt: skip
def test_counts_of_xan(backbone, norm, layers, channels):
    net = outline(backbone, norm)
    found = [module for module in net.modules() if isinstance(module, XANLayer)]
    assert (len(found), sum(layer.bn.num_features for layer in found)) == (layers, channels)
    state, personal = net.state_dict(), bn_scope(net, "xan")
    floats = sum(state[name].numel() for name in personal if state[name].is_floating_point())
    assert (floats, len(personal)) == (4 * channels + layers, 6 * layers)  # the down-link lacks just these
    if (backbone, layers) == ("resnet50", 53):  # the exchange of the paper
        assert sum(value.numel() for value in state.values() if value.is_floating_point()) == 23_628_721


def test_tensors_of_a_domain():
    xan, dson, bin = (outline("digits-cnn-bn", n).backbone.norm1 for n in (XAN(), DSON(channelwise=True), BIN()))
    batch_norm = {f"bn.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert set(xan.state_dict()) == {"inorm.weight", "inorm.bias", "s_in", "s_bn"} | batch_norm
    assert set(bn_scope(xan, "xan")) == batch_norm | {"s_bn"}
    assert set(bn_scope(dson)) == set(dson.state_dict())
    assert (tensor_kinds(dson)["theta_mean"], dson.theta_var.shape) == (Kind.BN_AFFINE, (2, *dson.weight.shape))
    assert (bin.lr_scales, tensor_kinds(bin)["rho"], "rho" in bn_scope(bin)) == ({"rho": 10.0}, Kind.WEIGHT, False)


def layers_of(net, kind):
    return {name: module for name, module in net.named_modules() if isinstance(module, kind)}


def test_where_ibn_is():
    """On DenseNet it is every third of 6, 12 and 24 layers, by batch norm first: floor(0.6 * 64) of 64 channels."""
    found = layers_of(outline("resnet18", IBN("a")), IBNLayer)
    assert sorted(found) == sorted(f"backbone.layer{s}.{b}.bn1" for s in (1, 2, 3) for b in (0, 1))
    assert found["backbone.layer1.0.bn1"].sizes == (32, 32)
    found = layers_of(outline("densenet121", IBN("a")), IBNLayer)
    first = found["backbone.features.denseblock1.denselayer1.norm1"]
    assert (len(found), first.sizes, first.instance_first) == (2 + 4 + 8, (38, 26), False)
    assert list(layers_of(outline("digits-cnn-bn", IBN("a")), IBNLayer)) == ["backbone.norm1"]
    assert isinstance(outline("digits-cnn-bn", IBN("b")).backbone.norm1, InstanceNorm2d)
    net = outline("resnet50", IBN("b"))
    assert isinstance(net.backbone.bn1, InstanceNorm2d)
    blocks = [name.rsplit(".", 1)[0] for name in layers_of(net, ResidualIBNBlock)]
    assert blocks == ["backbone.layer1", "backbone.layer2"]
    names = set(outline("resnet50").state_dict()) - set(net.state_dict())
    assert names == {f"backbone.bn1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
def test_the_block_of_ibn_b_normalizes_its_residual_sum(kind):
    plain, before_relu = kind(16 * kind.expansion, 16).eval(), []
    block, x = ResidualIBNBlock(copy.deepcopy(plain)).eval(), torch.rand(2, 16 * kind.expansion, 4, 4)
    plain.relu.register_forward_pre_hook(lambda module, args: before_relu.append(args[0].clone()))
    plain(x)
    close(block(x), F.instance_norm(before_relu[-1]).relu())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_frozen_statistics_stay_and_the_affine_map_is_trained(kind):
    """By hand: (5 - 1) / sqrt(4) * 3 + 2 = 8 in training mode too; the derivative by gamma is 2."""
    net = nn.Sequential(kind(1, eps=0.0))
    with torch.no_grad():
        net[0].running_mean.fill_(1.0)
        net[0].running_var.fill_(4.0)
        net[0].weight.fill_(3.0)
        net[0].bias.fill_(2.0)
    names = list(net.state_dict())
    FreezeBn().apply(net)
    net.train()
    images = torch.full((2, 1) if kind is nn.BatchNorm1d else (2, 1, 1, 1), 5.0)
    output = net(images)
    assert output.flatten().tolist() == [8.0, 8.0]
    output[0].sum().backward()
    assert net[0].weight.grad.item() == 2.0
    assert (net[0].running_mean.item(), net[0].running_var.item(), net[0].num_batches_tracked.item()) == (1.0, 4.0, 0)
    assert list(net.state_dict()) == names
    assert not copy.deepcopy(net).train()[0].training


def test_a_run_keeps_the_statistics_of_its_start(tmp_path, caplog):
    folder, _ = run_small(tiny_experiment(tmp_path, {"name": "fedavg", "norm": "freeze_bn"}))
    model = load_file(folder / "last.safetensors")
    statistics = {name: array for name, array in model.items() if "running" in name}
    assert statistics
    assert all((array == (1 if name.endswith("var") else 0)).all() for name, array in statistics.items())
    assert "with model.weights = 'none' they are mean 0 and variance 1" in caplog.text
