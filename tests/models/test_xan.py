"""XAN layers: numbers worked out by hand, and properties."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models.norms import XAN
from fedsim.models.norms.xan import XANLayer
from fedsim.tensors.kinds import bn_scope

H = torch.tensor([[1.0, 3.0], [5.0, 7.0]]).view(2, 1, 1, 2)


def reference(layer, x):
    """The layer's definition written with PyTorch's own norms; it updates the running statistics."""
    w_bn, w_in = torch.softmax(torch.stack((layer.s_bn, layer.s_in)), 0)
    return w_in * F.instance_norm(x, weight=layer.inorm.weight, bias=layer.inorm.bias) + w_bn * layer.bn(x)


def test_hand_computed_batch():
    layer = XANLayer(nn.BatchNorm2d(1))
    expected = torch.tensor([[-1.170817, 0.276391], [-0.276391, 1.170817]])
    torch.testing.assert_close(layer(H).view(2, 2), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(layer.bn.running_mean, torch.tensor([0.4]))
    torch.testing.assert_close(layer.bn.running_var, torch.tensor([1.566667]))
    assert layer.bn.num_batches_tracked == 1
    exact = XANLayer(nn.BatchNorm2d(1, eps=0))(H).view(2, 2)
    torch.testing.assert_close(exact, torch.tensor([[-1.170820, 0.276393], [-0.276393, 1.170820]]), atol=2e-6, rtol=0)


def test_hand_computed_eval():
    layer = XANLayer(nn.BatchNorm2d(1, eps=0)).eval()
    torch.testing.assert_close(layer(H).view(2, 2), torch.tensor([[0.0, 2.0], [2.0, 4.0]]))
    assert layer.bn.num_batches_tracked == 0


def test_mixing_weights(trained_bn, images):
    layer = XANLayer(trained_bn).eval()
    layer.load_state_dict({**layer.state_dict(), "s_bn": torch.tensor(1.0), "s_in": torch.tensor(2.0)})
    w_bn, w_in = layer._weights(layer.s_bn, layer.s_in)
    torch.testing.assert_close(torch.stack((w_bn, w_in)), torch.tensor([0.268941, 0.731059]), atol=1e-6, rtol=0)
    before = layer(images)
    layer.load_state_dict({**layer.state_dict(), "s_bn": torch.tensor(6.0), "s_in": torch.tensor(7.0)})
    torch.testing.assert_close(layer(images), before)
    free = XANLayer(copy.deepcopy(trained_bn), mix="free")
    assert [w.item() for w in free._weights(free.s_bn, free.s_in)] == [0.5, 0.5]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_equals_its_definition_with_gradients(trained_bn, images, training, last):
    fused = XANLayer(trained_bn, in_init="copy_bn").double().train(training)
    nn.init.constant_(fused.s_in, 1.7)
    plain = copy.deepcopy(fused)
    if last:
        images = images.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(images.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    results = []
    for layer, forward in ((fused, fused), (plain, lambda x: reference(plain, x))):
        x = images.double().requires_grad_()
        y = forward(x)
        (y * weight).sum().backward()
        results.append((y.detach(), x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_first_and_second_order(trained_bn, training):
    layer = XANLayer(trained_bn).double().train(training)
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    parameters = tuple(layer.parameters())

    def run(x, *values):
        names = [name for name, _ in layer.named_parameters()]
        frozen = {name: value.clone() for name, value in layer.named_buffers()}
        return torch.func.functional_call(layer, {**dict(zip(names, values, strict=True)), **frozen}, (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters))
    assert torch.autograd.gradgradcheck(run, (x, *parameters))


def test_large_offset_loses_no_digits(trained_bn):
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 1000
    single, double = XANLayer(copy.deepcopy(trained_bn)), XANLayer(trained_bn).double()
    torch.testing.assert_close(single(x.float()).double(), double(x), atol=2e-3, rtol=0)  # the input's own rounding
    torch.testing.assert_close(single.bn.running_var.double(), double.bn.running_var, rtol=1e-5, atol=0)


def test_plain_batch_norm_when_its_weight_is_one(trained_bn, images):
    plain, layer = copy.deepcopy(trained_bn), XANLayer(trained_bn)
    nn.init.constant_(layer.s_bn, 100.0)
    torch.testing.assert_close(layer(images), plain(images))
    torch.testing.assert_close(layer.eval()(images), plain.eval()(images))
    torch.testing.assert_close(layer.bn.running_var, plain.running_var)


def test_training_is_plain_batch_norm_when_its_weight_is_one(build):
    losses = []
    for norm in (None, XAN()):
        net = build("digits-cnn-bn", norm, size=28)
        for module in net.modules():
            if isinstance(module, XANLayer):
                nn.init.constant_(module.s_bn, 100.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            x, y = torch.randn(8, 3, 28, 28, generator=generator), torch.randint(0, 7, (8,), generator=generator)
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(("backbone", "norm", "layers", "channels"), [
    ("resnet50", XAN(), 53, 26_560), ("resnet50", XAN(stages=(1, 2)), 24, 5_056),
    ("densenet121", XAN(stages=(1,), stem=False), 13, 1_888), ("densenet121", XAN(stages=(1,)), 14, 1_952),
    ("densenet121", XAN(), 121, 41_824),
])  # fmt: skip
def test_counts(build, backbone, norm, layers, channels):
    net = build(backbone, norm)
    found = [module for module in net.modules() if isinstance(module, XANLayer)]
    assert (len(found), sum(layer.bn.num_features for layer in found)) == (layers, channels)
    state, personal = net.state_dict(), bn_scope(net, "xan")
    floats = sum(state[name].numel() for name in personal if state[name].is_floating_point())
    assert floats == 4 * channels + layers  # the down-link lacks just these
    assert len(personal) == 6 * layers


def test_both_norms_of_the_digits_network(build):
    net = build("digits-cnn-bn", XAN(stages=(1,), stem=False), size=28)
    assert isinstance(net.backbone.norm1, XANLayer)
    assert isinstance(net.backbone.norm2, XANLayer)


def test_exchange_of_the_paper(build):
    state = build("resnet50", XAN()).state_dict()
    floats = sum(value.numel() for value in state.values() if value.is_floating_point())
    assert floats == 23_628_721


def test_state_names(build):
    net = build("densenet121", XAN(stages=(1,), stem=False))
    layer = net.get_submodule("backbone.features.transition1.norm")
    names = {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "inorm.weight",
             "inorm.bias", "s_bn", "s_in"}  # fmt: skip
    assert set(layer.state_dict()) == names
    assert layer.s_bn.shape == layer.s_in.shape == ()
    assert set(bn_scope(layer, "xan")) == names - {"inorm.weight", "inorm.bias", "s_in"}
    assert isinstance(net.backbone.features.norm0, nn.BatchNorm2d)


def test_single_pixel_maps(build, trained_bn):
    layer, x = XANLayer(copy.deepcopy(trained_bn)), torch.randn(6, 4, 1, 1)
    nn.init.constant_(layer.inorm.bias, 2.0)
    torch.testing.assert_close(layer(x), 0.5 * trained_bn(x) + 1.0)
    y = build("resnet50", XAN())(torch.randn(2, 3, 32, 32))
    y.sum().backward()
    assert y.isfinite().all()
    with pytest.raises(ValueError, match="more than one value"):
        layer(x[:1])


def test_stages_without_batch_norm_are_refused(build):
    with pytest.raises(UserError, match="hold no batch norm"):
        build("resnet18", XAN(stages=(), stem=False))


def test_no_graph_in_inference(build):
    net = build("digits-cnn-bn", XAN(), size=28).eval()
    x = torch.randn(2, 3, 28, 28)
    with torch.inference_mode():
        fast = net(x)
    torch.testing.assert_close(net(x), fast)


def test_bfloat16_maps(trained_bn, images):
    layer = XANLayer(trained_bn)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(images.bfloat16().requires_grad_())
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.s_in.grad.isfinite()
