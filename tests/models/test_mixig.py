"""MixIG layers, their adapters and the zero-shot adapter: numbers worked out by hand, and properties."""

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import build, outline
from torch import nn

from fedsim.models.infer.alpha import ZeroShotAdapter
from fedsim.models.norms import MixIG, mixture
from fedsim.models.norms.adapter import Adapter
from fedsim.models.norms.instance import affine_map, instance_moments
from fedsim.models.norms.mixig import MixIGLayer, install_global, mixig_layers, switched
from fedsim.tensors.kinds import Kind, bn_scope, tensor_kinds

ADAPTER = MixIG(adapter=True)
close = torch.testing.assert_close


def numpy_state(net):
    return {name: value.numpy() for name, value in net.state_dict().items()}


def as_installed(layer, mean, std):
    layer.global_mean.copy_(torch.as_tensor(mean))
    layer.global_std.copy_(torch.as_tensor(std))
    layer.fresh = False
    return layer


def one_channel(mean, std, part=ADAPTER):
    return as_installed(MixIGLayer(nn.BatchNorm2d(1, eps=0.0), part).train(), mean, std)


def passed(layer, mode, x, **drawn):
    """The layer's output in another mode, with these draws."""
    for name, value in drawn.items():
        setattr(layer, name, value)
    with switched({"": layer}, mode):
        return layer(x)


@pytest.fixture
def layer(trained_bn):
    layer = MixIGLayer(trained_bn, ADAPTER).train()
    return as_installed(layer, torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 0.5, 1.5]))


POINTS = torch.tensor([1.0, 3.0]).view(1, 1, 1, 2)  # mean 2, biased standard deviation 1


@pytest.mark.parametrize("few", [False, True])
def test_mixed_and_adapted_statistics_by_hand(few, monkeypatch):
    """mu_D = 0.25 * 2 = 0.5 and sigma_D = 0.25 * 1 + 0.75 * 3 = 2.5. mu_t = 0.8 and sigma_t = 2.2; in training
    by the installed statistics, in eval mode by the running ones. In the form for a CPU and in that for a GPU."""
    monkeypatch.setattr(mixture, "prefers_few", lambda x: few)
    found = passed(one_channel(0.0, 3.0), "mixed", POINTS, u=torch.tensor([0.25]))
    close(found.flatten(), torch.tensor([0.2, 1.0]))
    layer = one_channel(0.0, 3.0)
    layer.adapter.fc2.weight.data.zero_()
    layer.adapter.fc2.bias.data.copy_(torch.tensor([0.0, 0.4]))
    expected = torch.tensor([1 / 11, 1.0])
    close(passed(layer, "adapted", POINTS, z=torch.zeros(1)).flatten(), expected)
    layer.norm.running_mean.fill_(0.0)
    layer.norm.running_var.fill_(9.0)
    close(passed(layer.eval(), "adapted", POINTS).flatten(), expected)
    x = torch.full((1, 1, 2, 2), 1.0)
    x[0, 0, 0, 0] = 1.002  # sigma_i 0.0009, so 1.1 sigma_i - 0.1 < 0
    found = passed(one_channel(0.0, 1.0), "mixed", x, u=torch.tensor([1.1]))
    close(found, (x - 1.1 * x.mean()) / 1e-3, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("z", "alpha"), [(-2.0, 0.0), (1.0, 0.8), (2.0, 1.0), (None, 0.3)])
def test_alpha_is_drawn_in_training_and_eps_at_inference(z, alpha):
    adapter = Adapter(3, 2)
    adapter.fc2.weight.data.zero_()
    adapter.fc2.bias.data.copy_(torch.tensor([0.5, 0.3]))
    found = Adapter.alpha(torch.randn(1, 6), None if z is None else torch.tensor([z]), *adapter.weights())
    assert found.item() == pytest.approx(alpha)


def test_mixed_and_adapted_passes_leave_no_trace_and_keep_samples_apart(layer, images):
    before = copy.deepcopy(layer.state_dict())
    layer.u = torch.rand(4)
    for mode in ("mixed", "adapted"):
        layer.z = torch.randn(6)
        with switched({"": layer}, mode):
            together = layer(images)
            layer.z = layer.z[2:3]
            close(layer(images[2:3]), together[2:3], atol=1e-6, rtol=1e-5)
    assert layer.mode == "local"
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    x, shape = torch.randn(3, 4, 1, 1), (1, 4, 1, 1)  # maps of one pixel use global statistics
    slope = layer.norm.weight / layer.global_std
    expected = (x - layer.global_mean.view(shape)) * slope.view(shape) + layer.norm.bias.view(shape)
    for mode in ("mixed", "adapted"):
        close(passed(layer, mode, x, u=torch.rand(4), z=torch.randn(3)), expected)


def test_new_layers_use_the_batch_and_pass_3_the_global_affine(trained_bn, images):
    bn1d = MixIGLayer(nn.BatchNorm1d(4), MixIG()).train()
    vectors = torch.randn(6, 4) * 3 + 1
    with switched({"": bn1d}, "mixed"):
        close(bn1d(vectors), nn.functional.batch_norm(vectors, None, None, training=True))
        as_installed(bn1d, torch.ones(4), torch.full((4,), 2.0))
        close(bn1d(vectors), (vectors - 1) / 2)
    assert bn1d.norm.num_batches_tracked == 0
    expected = nn.functional.batch_norm(images, None, None, trained_bn.weight, trained_bn.bias, training=True)
    found = passed(MixIGLayer(trained_bn, MixIG()).train(), "mixed", images, u=torch.zeros(4))
    close(found, expected, atol=1e-5, rtol=1e-4)
    layer = MixIGLayer(trained_bn, MixIG(adapter=True, adapter_affine="global")).train()
    as_installed(layer, torch.zeros(4), torch.ones(4))
    by_global = passed(layer, "adapted", images, z=torch.zeros(6))
    layer.affine = "local"
    weight, bias = (value.view(4, 1, 1) for value in (trained_bn.weight, trained_bn.bias))
    close(passed(layer, "adapted", images), by_global * weight + bias)


def test_global_statistics_average_variances_before_the_root():
    net = build("digits-cnn-bn", MixIG(), channels=1, size=28)
    arrays = numpy_state(net)
    name = "backbone.norm1.bn.running_var"
    arrays[name] = arrays[name] * 0 + (1 + 9) / 2
    install_global(net, arrays)
    layer = net.backbone.norm1
    assert not layer.fresh
    assert net.backbone.norm2.fresh
    assert layer.global_std.unique().item() == pytest.approx(2.236068, abs=3e-6)


def test_layers_and_parameters_of_the_paper_network():
    plain, net = (outline("resnet18", part, bottleneck=256) for part in (MixIG(), ADAPTER))
    layers, kinds = mixig_layers(net), tensor_kinds(net)
    assert sum(layer.norm.num_features for layer in layers.values()) == 4_800 + 256
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (plain, net)]
    assert sizes == [11_310_151, 11_310_151 + 218_540]
    adapters = [layer.adapter for layer in layers.values() if layer.adapter is not None]
    assert not any(adapter.fc1.weight.requires_grad for adapter in adapters)
    sizes = [sum(parameter.numel() for parameter in adapter.parameters()) for adapter in adapters]
    assert sorted(sizes) == [526] * 5 + [2_074] * 5 + [8_242] * 5 + [32_866] * 5
    assert {kinds[name] for name in bn_scope(net)} == {Kind.BN_AFFINE, Kind.BN_STATISTICS, Kind.COUNTER}
    assert len(bn_scope(net)) == 5 * 21
    assert not [name for name in net.state_dict() if "global" in name]


def test_fast_moments_and_affine(images):
    hard = torch.cat([images, 100 + 0.01 * images, torch.full_like(images[:1], 3.0)])  # cancelling digits, a constant
    mean, variance = instance_moments(hard)
    close(mean, hard.mean((2, 3)))
    exact = hard.double().var((2, 3), correction=0).float()
    close(variance, exact, rtol=2e-5, atol=1e-12)
    a, b = torch.randn(2, 6, 4)
    expected = a[:, :, None, None] * (images - 1.5) + b[:, :, None, None]
    for x in (images, images.contiguous(memory_format=torch.channels_last)):
        close(affine_map(x, torch.full((6, 4), 1.5), a, b), expected, atol=1e-5, rtol=1e-5)


def small_net():
    net = build("digits-cnn-bn", ADAPTER, channels=1, size=28).eval()
    return net, {path: layer for path, layer in mixig_layers(net).items() if layer.adapter is not None}


def test_spread_of_alpha_and_an_adapter_at_its_bound(caplog):
    """They are over all images of an evaluation, which come in batches. At the bound the clamp has no gradient, so
    that the first evaluation that finds it there warns once and names the layer."""
    (net, layers), rule, images = small_net(), ZeroShotAdapter(), torch.rand(12, 1, 28, 28)
    predict = rule.begin(net, tuple)
    apart = torch.cat([predict(part) for part in images.split(5)])
    with torch.no_grad(), switched(layers, "adapted"):
        torch.testing.assert_close(net(images), apart)  # each image is predicted by itself
    found = {(quantity, path): value for quantity, path, value in rule.details(net)}
    for path, layer in layers.items():
        alphas = layer.alpha.double()
        expected = [float(each) for each in (alphas.mean(), alphas.std(correction=0), alphas.min(), alphas.max())]
        names = ("alpha", "alpha_std", "alpha_min", "alpha_max")
        assert [found[name, path] for name in names] == pytest.approx(expected, abs=1e-6)
        assert 0 < found["alpha_min", path] < found["alpha_max", path] < 1
    net, layers = small_net()
    path, layer = next(iter(layers.items()))
    layer.adapter.fc2.bias.data[1] = 5.0
    for rule in (ZeroShotAdapter(), ZeroShotAdapter()):
        rule.begin(net, tuple)(torch.rand(4, 1, 28, 28))
        rule.details(net)
    (record,) = caplog.records
    assert f"{path} (1)" in record.getMessage()


def test_no_hidden_unit_starts_dead(monkeypatch):
    """Every unit of every adapter is positive for some image; every alpha depends on the image."""
    (net, layers), images, hidden, own = small_net(), torch.rand(64, 1, 28, 28), [], Adapter.alpha
    for layer in mixig_layers(net).values():
        layer.norm.momentum = 1.0
    watched = lambda shift, z, *fc: hidden.append(F.linear(shift, *fc[:2])) or own(shift, z, *fc)  # noqa: E731
    monkeypatch.setattr(Adapter, "alpha", staticmethod(watched))
    with torch.no_grad():
        net.train()(images)
        with switched(layers, "adapted"):
            net.eval()(images)
    assert len(hidden) == len(layers)
    assert all((units.amax(0) > 0).all() for units in hidden)
    assert all(0 < layer.alpha.min() < layer.alpha.max() < 1 for layer in layers.values())
