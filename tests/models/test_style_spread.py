"""DSU and FedFA on numbers worked out by hand, and in networks."""

import copy

import numpy as np
import pytest
import torch
from networks import build

from fedsim.common.errors import UserError
from fedsim.models.inserts.dsu import DSU, RedrawnStyles, map_moments, redrawn, spread_of
from fedsim.models.inserts.feature_spread import FeatureSpread, WidenedStyles, widening
from strategies.parts import ServerRound, Update
from strategies.refine.client_spread import ClientSpread

MAPS = torch.tensor(
    [[[[0, 2], [4, 2]], [[1, 3], [5, 7]]], [[[1, 1], [3, 7]], [[0, 0], [2, 2]]]], dtype=torch.float64
)  # two images of two channels


def close(found, expected, atol=1e-6):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), atol=atol, rtol=0)


def test_moments_and_spreads():
    """Means 2, 4 and 3, 1: their variances over the two images are .5 and 4.5."""
    mean, std = map_moments(MAPS, 1e-6)
    close(mean, [[2, 4], [3, 1]])
    close(std, [[1.6329934680, 2.5819890911], [2.8284273015, 1.1547009714]], 1e-8)
    close(spread_of(mean, 1e-6).square(), [0.500001, 4.500001], 1e-9)
    close(spread_of(std, 1e-6).square(), [0.7145320251, 1.0185766884], 1e-8)
    layer = RedrawnStyles(1.0, 1e-6)
    close(layer.spreads(MAPS)[0], [0.7071074883, 2.1213205793], 1e-8)


def test_dsu_with_all_noises_1():
    """mu 2 + .7071, sigma 1.633 + .8453: -2 / 1.633 of it below the mean, the mean itself, and as much above it."""
    layer = RedrawnStyles(1.0, 1e-6)
    ones = torch.ones(2, 2, 2, dtype=torch.float64)
    out = redrawn(MAPS, ones, layer.spreads(MAPS), 1e-6)
    close(out[0, 0].flatten(), [-0.3281691104, 2.7071074883, 5.7423840870, 2.7071074883], 1e-8)
    torch.testing.assert_close(redrawn(MAPS, 0 * ones, layer.spreads(MAPS), 1e-6), MAPS)
    only_mean = redrawn(MAPS, torch.stack([ones[0], 0 * ones[1]]), layer.spreads(MAPS), 1e-6)
    close(only_mean[:, 1] - MAPS[:, 1], np.full((2, 2, 2), 4.500001**0.5).tolist(), 1e-8)


def test_gradients_flow_through_the_statistics(monkeypatch):
    """With noise 1 alone in the mean of one channel: y = x + S, S = |mu_a - mu_b| / sqrt(2) up to eps."""
    x = torch.tensor([[[[0.0, 2.0]]], [[[2.0, 6.0]]]], dtype=torch.float64, requires_grad=True)
    layer = RedrawnStyles(1.0, 1e-9)
    noise = torch.tensor([[[1.0], [0.0]], [[0.0], [0.0]]], dtype=torch.float64)
    redrawn(x, noise, layer.spreads(x), 1e-9)[0].sum().backward()
    # of both pixels of image 0: d S / d x = -+ 1 / (2 sqrt 2) a pixel, twice
    close(x.grad.flatten(), [1 - 2**-0.5, 1 - 2**-0.5, 2**-0.5, 2**-0.5])


@pytest.mark.parametrize("layer", [RedrawnStyles(1.0, 1e-6), WidenedStyles(1.0, 1e-6, 2)])
def test_maps_of_half_precision_have_statistics_of_single_precision(layer):
    """A map is 1 in all pixels but one, where the next number of bfloat16 is: its deviation is 1/1024."""
    maps = torch.ones(3, 2, 8, 8, dtype=torch.bfloat16)
    maps[..., 0, 0] += 2**-7
    changed, gradients = [], []
    for x in (maps, maps.float()):
        x.requires_grad_()
        torch.manual_seed(0)
        out = layer.train()(x)
        assert out.dtype == x.dtype
        (out * torch.linspace(0, 1, 64).reshape(8, 8).to(x.dtype)).sum().backward()
        changed.append(out.detach().float())
        gradients.append(x.grad.float())
    torch.testing.assert_close(*changed, atol=2**-8, rtol=0)
    torch.testing.assert_close(*gradients, atol=0.02 * float(gradients[1].abs().max()), rtol=0)


@pytest.mark.parametrize("layer", [RedrawnStyles(1.0, 1e-6), WidenedStyles(1.0, 1e-6, 2)])
def test_where_a_layer_is_the_identity(layer):
    x = torch.rand(3, 2, 4, 4)
    before = copy.deepcopy(layer.state_dict())
    assert layer.eval()(x) is x
    assert layer.train()(x[:1]).equal(x[:1])
    assert layer(x[..., :1, :1]).equal(x[..., :1, :1])
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer.p = 0.0
    assert layer(x) is x
    layer.p = 1.0
    assert not layer(x).allclose(x)


def test_widening_by_hand():
    """V = (.5, 2): g = 1/3, 2/3, so that gamma = 2/3, 4/3; equal V give 1 everywhere."""
    close(widening(torch.tensor([0.5, 2.0], dtype=torch.float64)), [0.6666671852, 1.3333328148], 1e-9)
    close(widening(torch.tensor([3.2, 3.2, 3.2])), [1.0, 1.0, 1.0])
    layer = WidenedStyles(1.0, 1e-6, 2).double()
    layer.spread_mean.copy_(torch.tensor([0.5, 2.0]))
    close(layer.spreads(MAPS)[0], [0.9128719840, 3.2403703492], 1e-8)
    released = WidenedStyles(1.0, 1e-6, 2).double()
    for value in (1.0, 3.2):
        released.spread_mean.fill_(value)
        close(released.spreads(MAPS)[0], [1.0000009999995, 3.0000003333], 1e-8)


def test_running_statistics_follow_calls_that_draw():
    """.01 of the batch's mean style: means (2.5, 2.5), deviations (2.2307, 1.8683); they begin at 0 and 1."""
    layer = WidenedStyles(1.0, 1e-6, 2)
    layer(MAPS.float())
    close(layer.running_mean, [0.025, 0.025])
    close(layer.running_std, [0.99 + 0.01 * 2.2307104, 0.99 + 0.01 * 1.8683450], 1e-5)
    layer(MAPS.float())
    close(layer.running_mean, [0.04975, 0.04975])


def spread(updates, released=False, previous=(1.0, 1.0)):
    name = "feature_spread.0.{}_mean"
    server = ServerRound(1, 4, list("abc"), {name.format("spread"): np.float32(previous)})
    server.updates = [Update(client, 1, {name.format("running"): np.float32(row)}) for client, row in updates.items()]
    fused = {name.format("running"): np.float32((1, 3)), name.format("spread"): np.float32((7, 7)), "w": np.ones(1)}
    result = ClientSpread(released).refine(fused, server)
    assert result["w"] is fused["w"]
    assert result[name.format("running")] is fused[name.format("running")]
    assert result[name.format("spread")].dtype == np.float32
    return result[name.format("spread")].tolist()


def test_spread_over_clients_by_hand():
    """(0, 1), (2, 3), (1, 5): variances 1 and 4; the released code has 3.2, of all six numbers."""
    sent = {"a": (0, 1), "b": (2, 3), "c": (1, 5)}
    assert spread(sent) == [1, 4]
    assert spread(sent, released=True) == [pytest.approx(3.2)] * 2
    assert spread({"a": (0, 1)}, previous=(5.0, 6.0)) == [5, 6]


@pytest.mark.parametrize(("part", "count"), [(DSU(), 6), (DSU(stem=False), 4), (DSU(stages=(1,)), 3), (DSU(p=0.0), 6)])
def test_places_of_a_resnet(part, count):
    plain, net = build("resnet18"), build("resnet18", insert=part)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert len(net.redrawn_styles) == count
    x = torch.rand(4, 3, 32, 32)
    assert net.eval()(x).equal(plain.eval()(x))
    assert net.train()(x).allclose(plain.train()(x)) == (part.p == 0)
    twin = copy.deepcopy(net)
    for layer in net.redrawn_styles:
        layer.p = 0.0
    assert {layer.p for layer in twin.redrawn_styles} == {part.p}


def test_buffers_of_the_stages():
    net = build("resnet18", insert=FeatureSpread(p=1.0)).train()
    assert [layer.running_mean.numel() for layer in net.feature_spread] == [64, 128, 256, 512]
    assert "feature_spread.3.spread_std" in net.state_dict()
    net(torch.rand(4, 3, 64, 64))
    assert all(layer.running_mean.abs().sum() > 0 for layer in net.feature_spread)
    assert all((layer.spread_mean == 1).all() for layer in net.feature_spread)


@pytest.mark.parametrize("part", [DSU(), FeatureSpread()])
def test_a_network_without_stages_is_refused(part):
    with pytest.raises(UserError, match="the backbone has none of the stages"):
        build("digits-cnn", insert=part)
