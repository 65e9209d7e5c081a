"""RSC, in both variants, and L2D: augmenter, losses and the two stages of a step."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_round import Scaled, changed, digits_net, ready_round, small_round, snapshot, step_of
from torch import nn

from clients.augment.style_augmenter import StyleAugmenter, branch_weights, convolved, transposed
from clients.objective import self_challenging as rsc
from clients.objective.learn_to_diversify import ENTRY, LearnToDiversify, class_mmd, club
from clients.objective.self_challenging import SelfChallenging
from clients.parts import Batch
from clients.tools.cut_network import CutNetwork
from clients.tools.losses import supervised_contrast
from fedsim.common.errors import UserError
from fedsim.models import build_model
from fedsim.models.inserts.stochastic_embedding import StochasticEmbedding, moments_of
from fedsim.settings import ModelSettings, TrainSettings


@pytest.mark.parametrize(("g", "f", "mask"), [
    ([3.0, 1.0, 2.0], 1 / 3, [0, 1, 1]),  # the percentile is 2.33333
    ([3.0, 1.0, 2.0], 0.0, [0, 1, 1]), ([5.0, 1.0, 2.0, 4.0], 0.0, [0, 1, 1, 1]),  # the largest entry is always muted
])  # fmt: skip
def test_feature_mask(g, f, mask):
    assert rsc.feature_mask(torch.tensor([g]), f).tolist() == [mask]


@pytest.mark.parametrize(("size", "muted"), [(4, 2), (7, 3), (16, 6), (64, 22), (256, 86), (1024, 342)])
def test_a_percentile_that_is_an_entry_is_muted(size, muted):
    """Where 2/3 (D - 1) is whole, the percentile is an entry: D - 2/3 (D - 1) of D features are muted, in every row;
    of a batch of so many samples as many are challenged."""
    values = torch.randn(40, size, generator=torch.Generator().manual_seed(0))
    assert (rsc.feature_mask(values, 1 / 3) == 0).sum(1).tolist() == [muted] * 40
    for fall in values.sigmoid():
        logits = torch.stack((fall, 1 - fall), 1).log()
        assert rsc.most_changed(logits, logits.new_zeros(size, 2), torch.zeros(size, dtype=int), 1 / 3).sum() == muted


@pytest.mark.parametrize("frozen", [False, True])
def test_loss_of_one_sample(frozen):
    """Full logit 6, muted 3, loss log(1 + e^-3); a single sample is always muted, also with a frozen extractor."""
    weight = torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    net = Scaled(weight.clone())
    net.scale.requires_grad_(not frozen)
    batch = Batch(torch.ones(1, 3), torch.tensor([0]))
    loss = step_of(SelfChallenging(), ready_round(net, lr=0.01))(batch)
    assert loss.item() == pytest.approx(0.0485874, abs=1e-6)
    assert batch.logits[0].tolist() == [3, 0]
    assert not torch.equal(net.head.weight, weight)
    assert (net.scale.item() == 1) == frozen


def test_the_gradient_is_that_of_the_masked_features():
    """One step of the whole part equals the step on CE(h(z * M)), M worked out by hand for a linear head."""
    torch.manual_seed(0)
    net = Scaled(torch.randn(3, 6))
    images, labels = torch.randn(5, 6), torch.tensor([0, 1, 2, 1, 0])
    start = net.head.weight.detach().clone()
    g = start[labels]  # the gradient of o_y is the row of the class
    mask = (g < g.quantile(2 / 3, dim=1, keepdim=True)).float()
    p = [torch.softmax(net.head(z), 1)[range(5), labels].detach() for z in (images, images * mask)]
    fall = p[0] - p[1]
    mask[fall < fall.quantile(2 / 3)] = 1
    loss = nn.functional.cross_entropy(net.head(images * mask), labels)
    expected = torch.autograd.grad(loss, net.head.weight)[0]
    step_of(SelfChallenging(), ready_round(net, lr=0.01))(Batch(images, labels))
    assert torch.allclose((start - net.head.weight) / 0.01, expected, atol=1e-5)


def test_map_masks_and_batch_share():
    """Of ceil(HW/3) positions and ceil(C/3.2) channels; the share is .3, and .2 more after ten local epochs."""
    level = torch.zeros(1, 2, 2, 2)
    level[0, 0] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert rsc.spatial_mask(level, torch.ones(1, 2, 2, 2)).tolist() == [[[[1, 1], [0, 0]]]]  # ceil(4/3) = 2
    means = torch.tensor([0.1, 0.9, 0.3, 0.2])[None, :, None, None].expand(1, 4, 2, 2)
    assert rsc.channel_mask(means).flatten().tolist() == [1, 0, 0, 1]  # ceil(4/3.2) = 2
    before, labels = torch.tensor([[0.9, 0.1]] * 4).log(), torch.zeros(4, dtype=torch.int64)
    after = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.7, 0.3], [0.95, 0.05]]).log()
    assert rsc.largest_falls(before, after, labels, 0.3).tolist() == [True, False, False, False]
    assert rsc.largest_falls(before, after, labels, 1.0).tolist() == [True, False, True, False]
    assert [rsc.batch_share(e) for e in (0, 9.9, 10, 25, 99)] == pytest.approx([0.3, 0.3, 0.5, 0.7, 1.0])
    round = ready_round(digits_net(), images=8, round=4, steps=6, train=TrainSettings(epochs=3))
    assert rsc.epochs_done(round, 4) == 3 * 3 + 2
    round.train, round.images = TrainSettings(iterations=6), 12  # of the 8 images: 1.5 epochs a round
    assert rsc.epochs_done(round, 4) == pytest.approx(4.5 + 1)


@pytest.mark.parametrize(("backbone", "size"), [
    ("digits-cnn-bn", 16), ("densenet121", 32),
    pytest.param("alexnet", 64, marks=pytest.mark.slow),  # 57 million weights
])  # fmt: skip
def test_cut_network(backbone, size):
    """tail(front(x)) is the network's features, with their gradients; a mask on the map changes them."""
    torch.manual_seed(0)
    net = build_model(ModelSettings(backbone=backbone, bottleneck=8), 3, 3, size, None, 0).eval()
    images = torch.rand(2, 3, size, size)
    whole = net.features(images)
    whole.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    cut = CutNetwork(net, net.levels[-1])
    level = cut.front(images)
    features = cut.tail(level)
    features.square().sum().backward()
    assert features.equal(whole)
    assert all(torch.allclose(net.get_parameter(name).grad, own, atol=1e-5) for name, own in gradients.items())
    assert not cut.tail(level * 0.5).equal(whole)
    assert net.features(images).equal(whole)  # nothing is left behind in the network


def test_the_released_variant_takes_a_step():
    """Mirrored copies double the batch in every field; running statistics and counters move once."""
    part = SelfChallenging("official")
    assert part.needs_levels
    round = ready_round(digits_net(28, bottleneck=8), size=28)
    batch, before = round.data.batch(np.arange(6)), round.net.head.weight.detach().clone()
    assert math.isfinite(step_of(part, round)(batch).item())
    assert len(batch.logits) == 12
    assert not round.net.head.weight.equal(before)
    assert {int(b) for name, b in round.net.named_buffers() if name.endswith("num_batches_tracked")} == {1}
    assert batch.normalize(batch.augmented).equal(batch.images)
    assert batch.augmented[6:].equal(batch.augmented[:6].flip(-1))
    assert batch.positions.tolist() == [*range(6), *range(6)]
    assert batch.labels.equal(round.data.labels[batch.positions])


def test_contrast_and_mmd():
    """Two orthogonal classes at temperature 1, and the formula by anchors; the MMD is a mean over present classes."""
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
    torch.manual_seed(0)
    a, b, labels = torch.randn(5, 4), torch.randn(5, 4) + 1, torch.tensor([3, 0, 3, 0, 3])
    expected = (by_hand(a[labels == 0], b[labels == 0]) + by_hand(a[labels == 3], b[labels == 3])) / 2
    assert class_mmd(a, b, labels, 65).item() == pytest.approx(expected, rel=1e-4)
    assert class_mmd(a, a, labels, 65).item() == pytest.approx(0, abs=1e-6)
    alone = class_mmd(a[:1], b[:1], labels[:1], 65)  # two points at distance s: 2 * 5 - 2 sum exp(-4 / 2^i)
    assert alone.item() == pytest.approx(2 * (5 - sum(math.exp(-4 / 2**i) for i in range(5))), rel=1e-4)


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


@pytest.mark.parametrize(("mine", "reference"), [(convolved, F.conv2d), (transposed, F.conv_transpose2d)])
def test_convolutions(mine, reference):
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


def embedded():
    torch.manual_seed(0)
    net = digits_net(28, bottleneck=8)
    StochasticEmbedding(width=6).apply(net)
    return net


def test_embedding():
    """Eval mode gives mu without a draw; training draws with the deviation .2 exp(logvar / 2)."""
    net, images = embedded().eval(), torch.rand(4, 3, 28, 28)
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
    """Stage 2 changes nothing in the embedded, not even gradients or statistics; the next round keeps the augmenter."""
    round = ready_round(embedded(), size=28, lr=0.05, train=TrainSettings(precision=precision))
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
        round = ready_round(embedded(), size=28, lr=0.05)
        torch.manual_seed(1)
        step_of(LearnToDiversify(beta=beta), round)(round.data.batch(round.data.training_positions()))
        nets.append(round.net)
    assert not changed(nets[0], nets[1].state_dict())
