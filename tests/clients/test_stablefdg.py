"""StableFDG: what a step sends, trains on and leaves unchanged, and what is drawn for a batch with new styles."""

import copy
import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from small_round import changed, digits_net, ready_round, snapshot, step_of

from clients.objective.enlarged_batch import (
    Balanced,
    ClassBalanced,
    EnlargedBatch,
    StylePass,
    drawn_classes,
    lone_classes,
    own_style,
    partner_rows,
)
from clients.step.supervised import SupervisedStep
from fedsim.models.inserts.feature_highlighter import FeatureHighlighter
from fedsim.models.inserts.style_exploration import StyleExploration, in_style, moments
from fedsim.settings import TrainSettings

FOREIGN = {"style": np.tile(np.array([[3.0], [1.0], [0.1], [0.1]], np.float32), (1, 20))}


def network(highlighter=True, **values):
    """A small network with the layers, 20 channels in stage 1."""
    torch.manual_seed(0)
    net = digits_net(28)
    StyleExploration(**values).apply(net)
    if highlighter:
        FeatureHighlighter().apply(net)
    return net.train()


def round_of(net, images=8, record=FOREIGN, **values):
    return ready_round(net, {"feature_style": record}, images, 28, 0.05, steps=2, **values)


def taken(step, net, positions, record=FOREIGN, **values):
    round = round_of(net, record=record, **values)
    batch = round.data.batch(np.array(positions))
    return batch, step_of(step, round)(batch).item(), round


def test_a_client_sends_the_style_of_all_its_images():
    """Worked out with NumPy from the maps after the second norm, in eval mode; no image is augmented."""
    net, seen = network(), []
    round = round_of(net, 7, train=TrainSettings(batch_size=3))
    found = own_style(round).numpy()
    hook = net.backbone.norm2.register_forward_hook(lambda module, inputs, y: seen.append(y.detach().double().numpy()))
    net.eval()(next(round.data.evaluation(round.data.training_positions(), 7))[0])
    hook.remove()
    mean, std = seen[0].mean((2, 3)), np.sqrt(seen[0].var((2, 3), ddof=1) + 1e-6)
    expected = [each.mean(0) for each in (mean, std)]
    expected += [np.sqrt(each.var(0, ddof=1) + 1e-6) for each in (mean, std)]
    assert found == pytest.approx(np.stack(expected), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_trains_on_the_enlarged_batch(precision):
    """Terms see its features and labels; every weight of the highlighter but that of the values gets a gradient."""
    net = network(p=1.0)
    batch, loss, round = taken(EnlargedBatch(sharing=1.0), net, range(6), train=TrainSettings(precision=precision))
    assert math.isfinite(loss)
    assert batch.labels.tolist()[:6] == [0, 1, 2, 0, 1, 2]
    assert batch.labels.bincount().tolist() == [4, 4, 4]
    assert (len(batch.features), len(batch.logits), len(batch.images)) == (12, 12, 6)
    gradient = net.bottleneck.project.weight.grad
    assert (gradient[:60].abs().sum((1, 2, 3)) > 0).all()
    assert not gradient[60:].any()
    assert round.outbox["feature_style"]["style"].shape == (4, 20)
    assert net.backbone.norm2.num_batches_tracked == 1


@pytest.mark.parametrize(("sharing", "record", "shared"), [(1.0, FOREIGN, True), (1.0, {}, False), (0.0, {}, False)])
def test_without_a_style_nothing_is_shared(sharing, record, shared):
    """Round 1, a client alone in its round, and `sharing = 0`, which sends nothing, give the plain step."""
    net = network(highlighter=False, p=0.0)
    plain = copy.deepcopy(net)
    _, loss, round = taken(EnlargedBatch(sharing=sharing), net, range(6), record)
    _, other, _ = taken(SupervisedStep(), plain, range(6))
    assert (loss != other) == shared == bool(changed(net, plain.state_dict()))
    assert ("feature_style" in round.outbox) == bool(sharing)


def test_the_class_balanced_batch_changes_nothing():
    """Weights, running statistics, counters and gradients are those before; maps and queries are of its images."""
    net = network()
    round = round_of(net)
    labels, before = round.data.labels.numpy(), snapshot(net)
    balanced = ClassBalanced(round, labels, 2.0, net.bottleneck, np.random.default_rng(0))
    balanced.draw(0)
    found = balanced.passed()
    assert not changed(net, before)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert found.labels.tolist() == [0, 1, 2]
    assert found.maps[1].shape[0] == len(found.queries) == 3
    images = balanced.images
    balanced.draw(1)
    assert balanced.images is images
    assert balanced.passed().maps[1].equal(found.maps[1])
    balanced.draw(2)  # the next local epoch
    assert balanced.images is not images


def test_partners_in_the_highlighter():
    """Two samples of one class get each other's query; alone in its class a sample gets that of the balanced batch."""
    net, seen = network(p=0.0), []
    paired = type(net.bottleneck).paired

    def spied(self, partners):
        return paired(self, lambda queries: seen.append((queries, partners(queries))) or seen[-1][1])

    net.bottleneck.paired = spied.__get__(net.bottleneck)
    taken(EnlargedBatch(sharing=0.0), net, [0, 1, 4])
    (balanced, same), (queries, partners) = seen
    assert same.equal(balanced)
    assert partners.equal(torch.stack([balanced[0], queries[2], queries[1]]))


@pytest.mark.parametrize("positions", [[0], [0, 1, 2]])
def test_a_client_with_one_class(positions):
    """It has no class-balanced batch, which would have one image; a batch of one image is its own partner."""
    round = round_of(network(p=1.0))
    round.data.labels = torch.zeros_like(round.data.labels)
    batch = round.data.batch(np.array(positions))
    assert math.isfinite(step_of(EnlargedBatch(), round)(batch).item())
    assert batch.labels.tolist() == [0] * 2 * len(positions)


RNG = np.random.default_rng
PAIRS = [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("labels", "count", "total"), [
    (PAIRS, 6, [4, 4, 4]), ([0, 0, 0, 0, 1, 1], 4, [5, 5]), ([0, 0, 0, 0, 1, 1], 2, [4, 4]),
    ([0, 0, 0, 0, 0, 1, 1], 2, [5, 4]), ([3, 3], 0, [2]),
])  # fmt: skip
def test_small_classes_catch_up(labels, count, total):
    drawn = drawn_classes(np.array(labels), count, RNG(0))
    assert len(drawn) == count
    assert np.unique([*labels, *drawn], return_counts=True)[1].tolist() == total
    if count == 4:  # first the smaller class, then both in any order
        assert drawn[:2].tolist() == [1, 1]
    # where not all of the smallest classes fit, they are drawn at random
    drawn = {tuple(sorted(drawn_classes(np.array([0, 1, 2, 3, 3]), 2, RNG(seed)))) for seed in range(40)}
    assert drawn == {(0, 1), (0, 2), (1, 2)}


@pytest.mark.parametrize(("others", "fourth"), [([1, 3, 5], 6 + 1), ([1, 5], 3), ([], 3)])
def test_partners(others, fourth):
    """The next of the class, after the last the first; a class with one sample gets that of the other batch."""
    labels = np.array([5, 1, 5, 3, 5, 1])
    assert lone_classes(labels).tolist() == [3]
    assert partner_rows(labels, np.array(others, int)).tolist() == [2, 5, 4, fourth, 0, 1]


def maps(count, side=3, seed=0):
    return torch.randn(count, 2, side, side, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def passed(labels, foreign=None, mixes=True, active=None, **values):
    """A pass that explores wherever it can, or in these stages."""
    styles = StylePass(StyleExploration(p=1.0, **values), [1, 2, 3], np.array(labels), foreign, RNG(0))
    if not mixes:  # the Beta draws are 1, so that no styles are mixed
        styles.rng = Mock(wraps=RNG(0), beta=lambda a, b, size: np.ones(size))
    styles.active = styles.active if active is None else active
    return styles


def test_labels_of_the_enlarged_batch():
    """Later stages add nothing. M and Sigma are constants: the gradient of a sum over a map is 0."""
    styles, x = passed(PAIRS), maps(6)
    first = styles.acts(1, x)
    assert len(first) == len(styles.labels) == 12
    assert styles.labels[:6].tolist() == PAIRS
    assert np.bincount(styles.labels).tolist() == [4, 4, 4]
    assert styles.acts(2, first).shape == first.shape
    first.square().sum().backward()
    assert x.grad.isfinite().all()
    x = maps(4)
    passed([0, 0, 1, 1]).acts(1, x).sum().backward()
    assert x.grad.abs().max() < 1e-5


def test_unmixed_contents_and_a_class_with_one_sample():
    """With lambda 1 the batch is unchanged; with alpha 0 an added sample is a copy of one of its class, and with
    alpha 3 the means of its channels are pushed from the batch's by three times their distance. Its style is not
    pushed away, and the draw of classes counts it; with S' = 0 some such classes are left out."""
    x, styles, pushed = maps(6), passed(PAIRS, mixes=False, alpha=0.0), passed(PAIRS, mixes=False)
    out, far = styles.acts(2, x), pushed.acts(2, x)
    for found in (out, far):
        torch.testing.assert_close(found[:6], x, atol=1e-5, rtol=1e-5)
    for label, row in zip(styles.labels[6:], out[6:], strict=True):
        assert min((row - each).abs().max().item() for each in x[styles.labels[:6] == label]) < 1e-5
    mean = moments(out)[0][6:]
    torch.testing.assert_close(moments(far)[0][6:], mean + 3 * (mean - moments(x)[0].mean(0)), atol=1e-4, rtol=1e-4)
    styles, other = passed([0, 0, 0, 1], mixes=False, additions=2), maps(2, seed=1).detach()
    styles.balanced = Balanced(np.array([0, 1]), {2: other})
    out = styles.acts(2, maps(4))
    assert styles.labels.tolist() == [0, 0, 0, 1, 1, 1]
    torch.testing.assert_close(out[4], other[1], atol=1e-5, rtol=1e-5)
    many = passed([0, 1, 2, 3], additions=2)
    many.balanced = Balanced(np.arange(4), {1: maps(4, seed=1)})
    assert len(many.acts(1, maps(4))) == 6
    assert np.bincount(many.labels).max() == len(set(many.labels[4:])) == 2


def test_stages_act_independently_and_sharing_comes_first():
    """Half of the batch is drawn from the foreign style; the pass without exploration has as many rows as before.
    With probability p each, drawn when the pass is made; with 0 nothing is drawn."""
    foreign = torch.tensor([[5.0, 5.0], [2.0, 2.0], [1e-9, 1e-9], [1e-9, 1e-9]])
    styles, x = passed([0] * 5, foreign, active=[]), maps(5)
    out = styles.acts(1, x)
    changed = [not row.equal(own) for row, own in zip(out, x, strict=True)]
    assert sum(changed) == 2
    torch.testing.assert_close(moments(out)[0][changed], torch.full((2, 2, 1, 1), 5.0), atol=1e-4, rtol=1e-4)
    assert styles.acts(2, x) is x
    assert passed([0] * 3, foreign).acts(1, maps(3)).shape[0] == 6
    assert passed([0] * 3, foreign, active=[]).acts(1, x[:3]).equal(x[:3])
    styles, x, wide = passed([0, 0, 1, 1]), maps(4, side=1), maps(4)
    assert styles.acts(1, x) is x
    assert not styles.enlarged
    styles.active = [2]
    assert styles.acts(1, wide) is wide
    assert len(styles.acts(2, wide)) == 8
    assert in_style(wide, *moments(wide.detach())).equal(wide)
    rng = RNG(0)
    drawn = [tuple(StylePass(StyleExploration(p=0.5), [1, 2, 3], np.zeros(2), None, rng).active) for _ in range(400)]
    assert len(set(drawn)) == 8
    assert 20 < drawn.count(()) < 80
    state = rng.bit_generator.state
    assert StylePass(StyleExploration(p=0.0), [1, 2, 3], np.zeros(2), None, rng).active == []
    assert rng.bit_generator.state == state
