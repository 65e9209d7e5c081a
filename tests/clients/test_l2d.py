"""L2D: augmenter, losses and the two stages of a step."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_round import changed, digits_net, ready_round, small_round, snapshot, step_of

from clients.augment.style_augmenter import StyleAugmenter, branch_weights, convolved, transposed
from clients.objective.learn_to_diversify import ENTRY, LearnToDiversify, class_mmd, club
from clients.tools.losses import supervised_contrast
from fedsim.common.errors import UserError
from fedsim.models.inserts.stochastic_embedding import StochasticEmbedding, moments_of
from fedsim.settings import TrainSettings


def test_contrast_numbers():
    """Two orthogonal classes, both views equal, temperature 1; and the formula, anchor by anchor."""
    z = torch.eye(2).repeat(2, 1)
    assert supervised_contrast(z, torch.tensor([0, 1, 0, 1]), 1.0).item() == pytest.approx(0.551445, abs=1e-6)
    torch.manual_seed(0)
    z, labels = F.normalize(torch.randn(6, 3)), torch.tensor([0, 0, 1, 0, 0, 1])
    s, total = (z @ z.T / 0.3).exp(), 0.0
    for i in range(6):
        others = [j for j in range(6) if j != i]
        positive = [j for j in others if labels[j] == labels[i]]
        total -= sum(math.log(s[i, j] / sum(s[i, k] for k in others)) for j in positive) / len(positive)
    assert supervised_contrast(z, labels, 0.3).item() == pytest.approx(total / 6, rel=1e-5)


@pytest.mark.parametrize(("logvar", "partners", "bound"), [(0, [1, 0], 2), (0, [0, 1], 0), (math.log(4), [1, 0], 0.5)])
def test_club_numbers(logvar, partners, bound):
    """e = mu = (0, 2)."""
    mean = torch.tensor([[0.0], [2.0]])
    found = club(mean, torch.full((2, 1), float(logvar)), mean, torch.tensor(partners))
    assert found.item() == pytest.approx(bound)


def by_hand(a, b):
    """MMD of one class: five kernels exp(-d / b_i), b = mean distance of the pairs / 4, doubled four times."""
    z = torch.cat([a, b])
    d, n = torch.cdist(z, z).square(), len(a)
    base = d.sum() / (len(z) * (len(z) - 1)) / 4
    k = sum(torch.exp(-d / (base * 2**i)) for i in range(5))
    return (k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()).item()


def test_mmd_of_classes():
    """Equal embeddings give 0; the mean is over the classes that have images."""
    torch.manual_seed(0)
    a, b, labels = torch.randn(5, 4), torch.randn(5, 4) + 1, torch.tensor([3, 0, 3, 0, 3])
    expected = (by_hand(a[labels == 0], b[labels == 0]) + by_hand(a[labels == 3], b[labels == 3])) / 2
    assert class_mmd(a, b, labels, 65).item() == pytest.approx(expected, rel=1e-4)
    assert class_mmd(a, a, labels, 65).item() == pytest.approx(0, abs=1e-6)
    alone = class_mmd(a[:1], b[:1], labels[:1], 65)  # two points at distance s: 2 * 5 - 2 sum exp(-4 / 2^i)
    assert alone.item() == pytest.approx(2 * (5 - sum(math.exp(-4 / 2**i) for i in range(5))), rel=1e-4)


@pytest.mark.parametrize(("mine", "reference"), [(convolved, F.conv2d), (transposed, F.conv_transpose2d)])
def test_convolutions(mine, reference):
    """Values and gradients are equal to PyTorch's."""
    torch.manual_seed(0)
    x, kernel, bias = torch.randn(2, 3, 12, 13, requires_grad=True), torch.randn(3, 3, 5, 5), torch.randn(3)
    wanted = reference(x, kernel, bias)
    assert torch.allclose(mine(x, kernel, bias), wanted, atol=1e-5)
    upstream = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(f(x, kernel, bias), x, upstream)[0] for f in (mine, reference)]
    assert torch.allclose(*gradients, atol=1e-4)


def test_augmenter():
    """Learned maps have H - k + 1 pixels; images keep their size; stage 2 is random only by dropout, unlike stage 1."""
    torch.manual_seed(0)
    augmenter = StyleAugmenter(3, 224, 224)
    assert [tuple(scale.shape[1:]) for scale in augmenter.scale] == [(s, s) for s in (216, 212, 208, 220)]
    scale, shift = augmenter.scale[0], augmenter.shift[0]
    assert [scale.mean().item(), scale.std().item(), shift.mean().item()] == pytest.approx([1, 0.1, 0], abs=0.01)
    assert {name.split(".")[0] for name, _ in augmenter.named_parameters()} == {"noise", "scale", "shift"}
    small, x = StyleAugmenter(1, 16, 16), torch.rand(2, 1, 16, 16)
    assert small.kernels == [9, 13, 5]

    def twice(fresh):
        return [(torch.manual_seed(seed), small(x, fresh))[1] for seed in (0, 1)]

    same, other = twice(fresh=False)
    assert same.shape == x.shape
    assert (same - other).abs().max() <= 2 / 4 + 1e-6  # only the colour branch (a quarter of four), by its dropout
    assert same.abs().max() <= 1
    first, second = twice(fresh=True)
    assert not first.equal(second)
    assert sum(branch_weights(5)) == pytest.approx(1, abs=1e-4)


def network():
    """A small network with the embedding."""
    torch.manual_seed(0)
    net = digits_net(28, bottleneck=8)
    StochasticEmbedding(width=6).apply(net)
    return net


def test_embedding():
    """Eval mode gives mu without a draw; training draws with the deviation .2 exp(logvar / 2)."""
    net, images = network().eval(), torch.rand(4, 3, 28, 28)
    mean, logvar = moments_of(net.features(images), "test")
    assert net.features(images).equal(mean)
    assert (logvar >= 0).all()
    e = net.bottleneck[-1].train()(torch.rand(1, 8).expand(20000, 8))
    mean, logvar = moments_of(e, "test")
    assert torch.allclose(e.std(0), 0.2 * (logvar[0] / 2).exp(), rtol=0.05)
    assert torch.allclose(e.mean(0), mean[0], atol=0.01)
    with pytest.raises(UserError, match="stochastic_embedding"):
        moments_of(torch.rand(2, 3), "l2d")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_moves_both_and_the_augmenter_stays_home(precision):
    """Stage 2 changes nothing in the network, not even gradients or statistics; the next round keeps the augmenter."""
    round = ready_round(network(), size=28, lr=0.05, train=TrainSettings(precision=precision))
    net, step = round.net, step_of(LearnToDiversify(), round)
    augmenter, names = round.scratch[ENTRY], set(net.state_dict())
    start = snapshot(augmenter)
    assert math.isfinite(step(round.data.batch(round.data.training_positions())).item())
    assert set(net.state_dict()) == names
    assert int(net.state_dict()["backbone.norm1.num_batches_tracked"]) == 1
    assert all(value.grad.isfinite().all() for value in net.parameters())
    moved = {name.split(".")[0] for name in changed(augmenter, start)}
    assert moved >= {"scale", "shift"}
    assert not any(name.startswith("fixed") for name in moved)
    LearnToDiversify().end(round)
    round.store.commit()
    round.store.open_round(2)
    assert round.outbox == {}
    again = small_round(round.data, net=net, round=2, store=round.store)
    step_of(LearnToDiversify(), again)
    assert not changed(again.scratch[ENTRY], augmenter.state_dict())


def test_stage_two_takes_no_step_of_the_network():
    """The network's step is independent of stage 2."""
    nets = []
    for beta in (0.1, 5.0):
        round = ready_round(network(), size=28, lr=0.05)
        torch.manual_seed(1)
        step_of(LearnToDiversify(beta=beta), round)(round.data.batch(round.data.training_positions()))
        nets.append(round.net)
    assert not changed(nets[0], nets[1].state_dict())
