"""L2D: augmenter, losses and the two stages of a step."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_round import colour_images, small_data, small_round, step_of

from clients.augment.style_augmenter import StyleAugmenter, branch_weights, convolved, transposed
from clients.objective.learn_to_diversify import ENTRY, LearnToDiversify, class_mmd, club
from clients.optimizers import make_optimizer
from clients.tools.losses import supervised_contrast
from fedsim.common.errors import UserError
from fedsim.models import build_model
from fedsim.models.inserts.stochastic_embedding import StochasticEmbedding, moments_of
from fedsim.settings import ModelSettings, TrainSettings


def test_contrast_numbers():
    """Two orthogonal classes, both views equal, temperature 1; and the formula, anchor by anchor."""
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert supervised_contrast(z, torch.tensor([0, 1, 0, 1]), 1.0).item() == pytest.approx(0.551445, abs=1e-6)
    torch.manual_seed(0)
    z, labels = F.normalize(torch.randn(6, 3)), torch.tensor([0, 0, 1, 0, 0, 1])
    s, total = (z @ z.T / 0.3).exp(), 0.0
    for i in range(6):
        others = [j for j in range(6) if j != i]
        positive = [j for j in others if labels[j] == labels[i]]
        total -= sum(math.log(s[i, j] / sum(s[i, k] for k in others)) for j in positive) / len(positive)
    assert supervised_contrast(z, labels, 0.3).item() == pytest.approx(total / 6, rel=1e-5)


def test_club_numbers():
    """e = mu = (0, 2), logvar 0: 2 for swapped partners, 0 for the same; and with a variance."""
    mean, zero = torch.tensor([[0.0], [2.0]]), torch.zeros(2, 1)
    swap, same = torch.tensor([1, 0]), torch.tensor([0, 1])
    assert club(mean, zero, mean, swap).item() == pytest.approx(2)
    assert club(mean, zero, mean, same).item() == 0
    assert club(mean, zero + math.log(4), mean, swap).item() == pytest.approx(0.5)


def by_hand(a, b):
    """MMD of one class: five kernels exp(-d / b_i), b = mean distance of the pairs / 4, doubled four times."""
    z = torch.cat([a, b])
    d = torch.cdist(z, z).square()
    base = d.sum() / (len(z) * (len(z) - 1)) / 4
    k = sum(torch.exp(-d / (base * 2**i)) for i in range(5))
    n = len(a)
    return (k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()).item()


def test_mmd_of_classes():
    """Equal embeddings give 0; the mean is over the classes that have images."""
    torch.manual_seed(0)
    a, b = torch.randn(5, 4), torch.randn(5, 4) + 1
    labels = torch.tensor([3, 0, 3, 0, 3])
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
    assert augmenter.scale[0].mean().item() == pytest.approx(1, abs=0.01)
    assert augmenter.scale[0].std().item() == pytest.approx(0.1, abs=0.01)
    assert augmenter.shift[0].mean().item() == pytest.approx(0, abs=0.01)
    assert {name.split(".")[0] for name, _ in augmenter.named_parameters()} == {"noise", "scale", "shift"}
    small = StyleAugmenter(1, 16, 16)
    assert small.kernels == [9, 13, 5]
    x = torch.rand(2, 1, 16, 16)

    def twice(fresh):
        outputs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            outputs.append(small(x, fresh))
        return outputs

    same, other = twice(fresh=False)
    assert same.shape == x.shape
    assert (same - other).abs().max() <= 2 / 4 + 1e-6  # only the colour branch (a quarter of four), by its dropout
    assert same.abs().max() <= 1
    assert not twice(fresh=True)[0].equal(twice(fresh=True)[1])
    assert sum(branch_weights(5)) == pytest.approx(1, abs=1e-4)


def network():
    """A small network with the embedding."""
    torch.manual_seed(0)
    net = build_model(ModelSettings(backbone="digits-cnn-bn", bottleneck=8), 3, 3, 28, None, 0)
    StochasticEmbedding(width=6).apply(net)
    return net


def test_embedding():
    """Eval mode gives mu without a draw; training draws with the deviation .2 exp(logvar / 2)."""
    net = network()
    images = torch.rand(4, 3, 28, 28)
    assert net.eval()(images).equal(net(images))
    assert net(images).shape == (4, 3)
    mean, logvar = moments_of(net.features(images), "test")
    assert net.features(images).equal(mean)
    assert (logvar >= 0).all()
    layer = net.bottleneck[-1].train()
    u = torch.rand(1, 8).expand(20000, 8)
    e = layer(u)
    mean, logvar = moments_of(e, "test")
    assert torch.allclose(e.std(0), 0.2 * (logvar[0] / 2).exp(), rtol=0.05)
    assert torch.allclose(e.mean(0), mean[0], atol=0.01)
    with pytest.raises(UserError, match="stochastic_embedding"):
        moments_of(torch.rand(2, 3), "l2d")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_moves_both_and_the_augmenter_stays_home(precision):
    """Stage 2 changes nothing in the network, not even gradients or statistics; the next round keeps the augmenter."""
    net = network().train()
    data = small_data(colour_images(6, size=28))
    round = small_round(data, net=net, steps=1, train=TrainSettings(precision=precision))
    round.optimizer = make_optimizer(net, round.train, 0.05)
    step = step_of(LearnToDiversify(), round)
    start = {name: value.clone() for name, value in round.scratch[ENTRY].state_dict().items()}
    names = set(net.state_dict())
    assert math.isfinite(step(data.batch(data.training_positions())).item())
    assert set(net.state_dict()) == names
    assert int(net.state_dict()["backbone.norm1.num_batches_tracked"]) == 1
    after_stage_1 = {name: value.grad.clone() for name, value in net.named_parameters()}
    assert all(gradient.isfinite().all() for gradient in after_stage_1.values())
    moved = round.scratch[ENTRY].state_dict()
    changed = {name for name, value in moved.items() if not value.equal(start[name])}
    assert {name.split(".")[0] for name in changed} >= {"scale", "shift"}
    assert not any(name.startswith("fixed") for name in changed)
    LearnToDiversify().end(round)
    round.store.commit()
    round.store.open_round(2)
    assert round.outbox == {}
    again = small_round(data, net=net, round=2, store=round.store)
    step_of(LearnToDiversify(), again)
    assert all(value.equal(moved[name]) for name, value in again.scratch[ENTRY].state_dict().items())


def test_stage_two_takes_no_step_of_the_network():
    """With alpha1 = alpha2 = 0 the network's step is that of cross-entropy of both views, independent of stage 2."""
    results = []
    for beta in (0.1, 5.0):
        net = network().train()
        data = small_data(colour_images(6, size=28))
        round = small_round(data, net=net, steps=1)
        round.optimizer = make_optimizer(net, round.train, 0.05)
        torch.manual_seed(1)
        step_of(LearnToDiversify(beta=beta), round)(data.batch(data.training_positions()))
        results.append(net.state_dict())
    assert all(value.equal(results[1][name]) for name, value in results[0].items())
