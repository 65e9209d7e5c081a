"""The zero-shot adapter in a whole network: inference, its agreement with training, gradients."""

import pytest
import torch
import torch.nn.functional as F
from networks import build, make
from sklearn.datasets import load_digits

from fedsim.models.infer import ZeroShotAdapter
from fedsim.models.norms import MixIG
from fedsim.models.norms.mixig import mixig_layers, switched


def small_net():
    """(the small CNN with adapters, its layers that have one)."""
    net = build("digits-cnn-bn", MixIG(adapter=True), channels=1, size=28).eval()
    return net, {path: layer for path, layer in mixig_layers(net).items() if layer.adapter is not None}


def test_spread_of_alpha_is_recorded():
    """Mean, standard deviation and range are over all images of an evaluation, which come in batches."""
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


def test_an_adapter_at_its_bound_is_said_once(caplog):
    """There the clamp has no gradient, so the first evaluation that finds it warns once and names the layer."""
    net, layers = small_net()
    path, layer = next(iter(layers.items()))
    layer.adapter.fc2.bias.data[1] = 5.0
    for rule in (ZeroShotAdapter(), ZeroShotAdapter()):
        rule.begin(net, tuple)(torch.rand(4, 1, 28, 28))
        rule.details(net)
    (record,) = caplog.records
    assert f"{path} (1)" in record.getMessage()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_hidden_unit_starts_dead(seed):
    """On real digits every unit of every adapter is positive for some image; every alpha depends on the image."""
    images = F.interpolate(torch.tensor(load_digits().images[:128], dtype=torch.float32)[:, None] / 16, 28)
    net, seen = make("digits-cnn-bn", MixIG(adapter=True), channels=1, size=28, seed=seed).train(), {}
    for layer in mixig_layers(net).values():
        layer.norm.momentum = 1.0
    layers = {path: layer for path, layer in mixig_layers(net).items() if layer.adapter is not None}
    with torch.no_grad():
        net(images)
        for path, layer in layers.items():
            assert layer.adapter.fc1.out_features >= 4
            layer.register_forward_pre_hook(lambda module, inputs, path=path: seen.update({path: inputs[0]}))
        with switched(layers, "adapted"):
            net.eval()(images)
    for path, layer in layers.items():
        x, norm = seen[path], layer.norm
        std, std_g = (x.var((2, 3), correction=0) + norm.eps).sqrt(), (norm.running_var + norm.eps).sqrt()
        shift = torch.cat([x.mean((2, 3)) - norm.running_mean, std - std_g], 1)
        assert (layer.adapter.fc1(shift).relu().amax(0) > 0).all()
        assert 0 < layer.alpha.min() < layer.alpha.max() < 1
