"""MCSAD on numbers worked out by hand, and which layers it trains."""

import pytest
import torch
import torch.nn.functional as F
from small_round import digits_net, ready_round, snapshot
from torch import nn

from clients.objective.collaborative_styles import CollaborativeStyles, agreement, ascended, cut_paths
from clients.parts import Batch
from fedsim.common.errors import UserError
from fedsim.models.net import Net

MAP = torch.tensor([[[[0.0, 2.0], [4.0, 2.0]]]], dtype=torch.float64)
HEADS = torch.tensor([[1.0, -1.0], [-0.5, 0.5]], dtype=torch.float64)


def mean_loss(level):
    """The mean CE of both heads on mean(relu(x)), label 0."""
    z = level.relu().mean()
    return sum(F.cross_entropy(head[None] * z, torch.tensor([0])) for head in HEADS) / 2


def test_one_ascent_by_hand():
    """mu = 2, sigma = sqrt(8/3 + 1e-5); dL/dmu = .3168, dL/dsigma = .1293; lr 2."""
    assert mean_loss(MAP).item() == pytest.approx(1.0725389695, abs=1e-6)
    out = ascended(MAP, mean_loss, 2.0)
    std = (8 / 3 + 1e-5) ** 0.5
    expected = (MAP - 2) / std * 1.8916694055 + 2.6336184935
    torch.testing.assert_close(out, expected, atol=1e-7, rtol=0)
    assert mean_loss(out).item() == pytest.approx(1.3540597309, abs=1e-7)
    torch.testing.assert_close(ascended(MAP, mean_loss, 0.0), MAP)


def test_gradients_reach_the_map_and_not_the_style():
    """dy/dx = sigma'/sigma in every pixel, because mu, sigma, mu' and sigma' are constants."""
    level = MAP.clone().requires_grad_()
    ascended(level, mean_loss, 2.0).sum().backward()
    ratio = 1.8916694055 / (8 / 3 + 1e-5) ** 0.5
    torch.testing.assert_close(level.grad, torch.full_like(MAP, ratio), atol=1e-7, rtol=0)


def test_agreement_by_hand():
    """e = the mean of (1, 0, 0) and (0, 2, 0): .72159 for p of (2, 0, -1), .02813 for that of (1, 1, 0)."""
    e = torch.tensor([[0.5, 1.0, 0.0]], dtype=torch.float64)
    rows = [torch.tensor([row], dtype=torch.float64) for row in ((2.0, 0.0, -1.0), (1.0, 1.0, 0.0))]
    assert [agreement(row, e, 1.0).item() for row in rows] == pytest.approx([0.7215866346, 0.0281271906], abs=1e-9)
    assert agreement(2 * rows[0], 2 * e, 2.0).item() == pytest.approx(0.7215866346, abs=1e-9)


def taken(lr=0.1, **fields):
    """(network, its tensors before, the loss and the batch) of one step on six images."""
    net = digits_net()
    heads = {f"{client}:head.{key}": value.numpy() for client in "ab" for key, value in net.head.state_dict().items()}
    round, before = ready_round(net, {"heads": heads}, lr=lr, clients=("a", "b")), snapshot(net)
    batch = Batch(torch.rand(6, 3, 16, 16), torch.arange(6) % 3)
    loss = CollaborativeStyles(**fields).begin(round)(batch)
    loss.backward()
    return net, before, loss, batch


def test_the_released_code_gives_the_first_block_no_gradient():
    grads = {}
    for variant in ("paper", "released"):
        torch.manual_seed(0)
        net, *_ = taken(variant=variant)
        grads[variant] = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert grads["released"] == {name for name in grads["paper"] if "conv1" not in name and "norm1" not in name}
    assert "backbone.conv1.weight" in grads["paper"]


def test_the_summands():
    """With lr_adv = 0 both branches are equal; what the terms see is the first branch."""
    torch.manual_seed(0)
    _, _, plain, batch = taken(lr_adv=0.0)
    assert plain.item() == pytest.approx(2 * batch.loss.item(), rel=1e-4)
    assert batch.features.shape == (6, 50)
    torch.manual_seed(0)
    _, _, harder, _ = taken(lr_adv=50.0)
    assert harder > plain
    torch.manual_seed(0)
    _, _, contrasted, _ = taken(lr_adv=0.0, con=1.0)
    assert contrasted > plain
    torch.manual_seed(0)
    _, _, agreeing, _ = taken(lr_adv=0.0, cdrm=1.0)
    assert agreeing.item() == pytest.approx(plain.item(), rel=1e-3)  # both heads are the network's own


def test_a_network_without_two_places_is_refused():
    assert cut_paths(digits_net()) == ["backbone.pool1", "backbone.pool2"]
    with pytest.raises(UserError, match="collaborative_styles changes feature maps at two places"):
        cut_paths(Net(nn.Flatten(), 4, 3))
