"""The zero-shot adapter in a whole network: inference, its agreement with training, gradients (core.md 6.9)."""

import copy

import pytest
import torch
from torch import nn

from fedsim.models.infer import EvalMode, ZeroShotAdapter
from fedsim.models.norms import MixIG
from fedsim.models.norms.mixig import MixIGLayer, draw_z, install_global, mixig_layers, switched


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def trained(build):
    """A ResNet-18 with adapters, statistics away from their start and adapters away from theirs."""
    net = build("resnet18", MixIG(adapter=True), size=64, bottleneck=16)
    net.train()(torch.randn(8, 3, 64, 64))
    for one in mixig_layers(net).values():
        one.norm.weight.data.uniform_(0.5, 1.5)
        if one.adapter is not None:
            one.adapter.fc2.weight.data.normal_(std=0.1)
    install_global(net, {name: value.numpy() for name, value in net.state_dict().items()})
    return net


def test_forced_alpha(trained):
    x = torch.randn(3, 3, 64, 64)
    plain = EvalMode().begin(trained, tuple)(x)
    for value in (0.0, 1.0):
        for layer in mixig_layers(trained).values():
            if layer.adapter is not None:
                layer.adapter.fc2.weight.data.zero_()
                layer.adapter.fc2.bias.data.copy_(torch.tensor([0.0, value]))
        with torch.no_grad():
            adapted = ZeroShotAdapter().begin(trained, tuple)(x)
        if value == 0:
            torch.testing.assert_close(adapted, plain, atol=1e-4, rtol=1e-4)
        else:
            by_instance = copy.deepcopy(trained)
            for name, module in list(by_instance.named_modules()):
                if isinstance(module, MixIGLayer) and isinstance(module.norm, nn.BatchNorm2d):
                    parent, _, leaf = name.rpartition(".")
                    norm = nn.InstanceNorm2d(module.norm.num_features, affine=True)
                    norm.load_state_dict({"weight": module.norm.weight, "bias": module.norm.bias})
                    setattr(by_instance.get_submodule(parent), leaf, norm)
            torch.testing.assert_close(adapted, by_instance.eval()(x), atol=1e-3, rtol=1e-3)


def test_inference_is_per_image_and_deterministic(trained):
    x = torch.randn(5, 3, 64, 64)
    rule = ZeroShotAdapter()
    predict = rule.begin(trained, tuple)
    with torch.inference_mode():
        together, again = predict(x), predict(x)
        apart = torch.cat([predict(image[None]) for image in x])
    assert torch.equal(together, again)
    torch.testing.assert_close(apart, together, atol=1e-5, rtol=1e-5)
    recorded = rule.details(trained)
    assert [name for _, name, _ in recorded] == [name for name, layer in mixig_layers(trained).items() if layer.adapter]
    assert all(quantity == "alpha" and 0 <= value <= 1 for quantity, _, value in recorded)
    assert len({value for _, _, value in recorded}) > 10


def test_training_and_inference_form_agree(trained):
    """With z = 0 and the installed statistics, pass 3 computes what inference computes."""
    x = torch.randn(2, 3, 64, 64)
    layers = mixig_layers(trained)
    for layer in layers.values():
        layer.z = torch.zeros(2)
    with switched(layers, "adapted"), torch.no_grad():
        pass_3, inference = trained.train()(x), trained.eval()(x)
    torch.testing.assert_close(pass_3, inference, atol=1e-4, rtol=1e-4)


def test_gradients_reach_the_first_adapter_through_the_frozen_network(trained):
    layers = {path: layer for path, layer in mixig_layers(trained).items() if layer.adapter is not None}
    draw_z(layers, 4, torch.Generator().manual_seed(0))
    parameters = [parameter for layer in layers.values() for parameter in layer.adapter.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    with switched(mixig_layers(trained), "adapted"):
        loss = trained.train()(torch.randn(4, 3, 64, 64)).logsumexp(1).sum()
    first = layers["backbone.bn1"]
    inside = (first.alpha > 0) & (first.alpha < 1)
    assert inside.any()
    gradients = torch.autograd.grad(loss, parameters)
    assert all(gradient.abs().sum() > 0 for gradient in gradients[2:4])
    assert all(parameter.grad is None for parameter in trained.parameters())
