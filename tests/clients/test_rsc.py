"""RSC, in both variants."""

import math

import numpy as np
import pytest
import torch
from small_round import Scaled, colour_images, digits_net, ready_round, small_data, small_round, step_of
from torch import nn

from clients.objective import self_challenging as rsc
from clients.objective.self_challenging import SelfChallenging
from clients.parts import Batch
from clients.tools.cut_network import CutNetwork
from fedsim.models import build_model
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


def test_map_masks():
    """The released code's masks: ceil(HW/3) positions by sum_c mean(g)_c U_c; ceil(C/3.2) channels by mean g."""
    level = torch.zeros(1, 2, 2, 2)
    level[0, 0] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert rsc.spatial_mask(level, torch.ones(1, 2, 2, 2)).tolist() == [[[[1, 1], [0, 0]]]]  # ceil(4/3) = 2
    means = torch.tensor([0.1, 0.9, 0.3, 0.2])[None, :, None, None].expand(1, 4, 2, 2)
    assert rsc.channel_mask(means).flatten().tolist() == [1, 0, 0, 1]  # ceil(4/3.2) = 2
    before, labels = torch.tensor([[0.9, 0.1]] * 4).log(), torch.zeros(4, dtype=torch.int64)
    after = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.7, 0.3], [0.95, 0.05]]).log()
    assert rsc.largest_falls(before, after, labels, 0.3).tolist() == [True, False, False, False]
    assert rsc.largest_falls(before, after, labels, 1.0).tolist() == [True, False, True, False]


def test_batch_share_counts_the_epochs_of_the_run():
    """It is .3, and .2 more after every ten local epochs of the run; it does not start again in each round."""
    assert [rsc.batch_share(e) for e in (0, 9.9, 10, 25, 99)] == pytest.approx([0.3, 0.3, 0.5, 0.7, 1.0])
    round = small_round(small_data(colour_images(8)), round=4, steps=6, train=TrainSettings(epochs=3))
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
