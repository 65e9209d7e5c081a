"""What is drawn for a batch with new styles: added samples, their classes, partners, and what stays as it is."""

import numpy as np
import pytest
import torch

from clients.tools.style_pass import Balanced, StylePass, drawn_classes, lone_classes, partner_rows, picked_rows
from fedsim.models.inserts.style_exploration import StyleExploration, in_style, moments

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


def test_picked_rows_have_their_class():
    labels, classes = np.array([2, 0, 2, 1, 0]), np.array([0, 2, 2, 1] * 50)
    rows = picked_rows(labels, classes, RNG(0))
    assert labels[rows].tolist() == classes.tolist()
    assert set(rows) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("others", "fourth"), [([1, 3, 5], 6 + 1), ([1, 5], 3), ([], 3)])
def test_partners(others, fourth):
    """The next of the class, after the last the first; a class with one sample gets that of the other batch."""
    labels = np.array([5, 1, 5, 3, 5, 1])
    assert lone_classes(labels).tolist() == [3]
    assert partner_rows(labels, np.array(others, int)).tolist() == [2, 5, 4, fourth, 0, 1]


def maps(count, side=3, seed=0):
    """Random maps of two channels with a gradient."""
    return torch.randn(count, 2, side, side, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class AllOne:
    """A generator whose Beta draws are 1, so that no styles are mixed."""

    def __init__(self):
        self.rng = RNG(0)

    def beta(self, a, b, size):
        return np.ones(size)

    def __getattr__(self, name):
        return getattr(self.rng, name)


def passed(labels, foreign=None, mixes=True, active=None, **values):
    """A pass that explores wherever it can, or in these stages."""
    rng = RNG(0) if mixes else AllOne()
    styles = StylePass(StyleExploration(p=1.0, **values), [1, 2, 3], np.array(labels), foreign, RNG(0))
    styles.rng, styles.active = rng, styles.active if active is None else active
    return styles


def test_labels_of_the_enlarged_batch():
    """12 labels, the first six unchanged; later stages add nothing."""
    styles, x = passed(PAIRS), maps(6)
    first = styles.acts(1, x)
    assert len(first) == len(styles.labels) == 12
    assert styles.labels[:6].tolist() == PAIRS
    assert np.bincount(styles.labels).tolist() == [4, 4, 4]
    assert styles.acts(2, first).shape == first.shape
    first.square().sum().backward()
    assert x.grad.isfinite().all()


def test_unmixed_contents_keep_their_styles():
    """With lambda 1 the batch is unchanged; with alpha 0 an added sample is a copy of one of its class, and with
    alpha 3 the means of its channels are pushed from the batch's by three times their distance."""
    x, styles, pushed = maps(6), passed(PAIRS, mixes=False, alpha=0.0), passed(PAIRS, mixes=False)
    out, far = styles.acts(2, x), pushed.acts(2, x)
    for found in (out, far):
        torch.testing.assert_close(found[:6], x, atol=1e-5, rtol=1e-5)
    for label, row in zip(styles.labels[6:], out[6:], strict=True):
        assert min((row - each).abs().max().item() for each in x[styles.labels[:6] == label]) < 1e-5
    mean = moments(out)[0][6:]
    torch.testing.assert_close(moments(far)[0][6:], mean + 3 * (mean - moments(x)[0].mean(0)), atol=1e-4, rtol=1e-4)


def test_a_class_with_one_sample_gets_that_of_the_balanced_batch():
    """Its style is not pushed away, and the draw of classes counts it; with S' = 0 some such classes are left out."""
    styles, other = passed([0, 0, 0, 1], mixes=False, additions=2), maps(2, seed=1).detach()
    styles.balanced = Balanced(np.array([0, 1]), {2: other})
    out = styles.acts(2, maps(4))
    assert styles.labels.tolist() == [0, 0, 0, 1, 1, 1]
    torch.testing.assert_close(out[4], other[1], atol=1e-5, rtol=1e-5)
    many = passed([0, 1, 2, 3], additions=2)
    many.balanced = Balanced(np.arange(4), {1: maps(4, seed=1)})
    assert len(many.acts(1, maps(4))) == 6
    assert np.bincount(many.labels).max() == len(set(many.labels[4:])) == 2


def test_gradients_reach_contents_through_their_moments():
    """M and Sigma are constants and (x - mu)/sigma is not: a sum over a map does not depend on the map."""
    x = maps(4)
    passed([0, 0, 1, 1]).acts(1, x).sum().backward()
    assert x.grad.abs().max() < 1e-5


def test_sharing_comes_first_and_only_after_stage_one():
    """Half of the batch is drawn from the foreign style; the pass without exploration has as many rows as before."""
    foreign = torch.tensor([[5.0, 5.0], [2.0, 2.0], [1e-9, 1e-9], [1e-9, 1e-9]])
    styles, x = passed([0] * 5, foreign, active=[]), maps(5)
    out = styles.acts(1, x)
    changed = [not row.equal(own) for row, own in zip(out, x, strict=True)]
    assert sum(changed) == 2
    torch.testing.assert_close(moments(out)[0][changed], torch.full((2, 2, 1, 1), 5.0), atol=1e-4, rtol=1e-4)
    assert styles.acts(2, x) is x
    assert passed([0] * 3, foreign).acts(1, maps(3)).shape[0] == 6
    assert passed([0] * 3, foreign, active=[]).acts(1, x[:3]).equal(x[:3])


def test_maps_of_one_position_and_stages_that_do_not_act_are_left_as_they_are():
    styles, x, wide = passed([0, 0, 1, 1]), maps(4, side=1), maps(4)
    assert styles.acts(1, x) is x
    assert not styles.enlarged
    styles.active = [2]
    assert styles.acts(1, wide) is wide
    assert len(styles.acts(2, wide)) == 8
    assert in_style(wide, *moments(wide.detach())).equal(wide)


def test_stages_act_independently():
    """With probability p each, drawn when the pass is made; with 0 nothing is drawn."""
    rng = RNG(0)
    drawn = [tuple(StylePass(StyleExploration(p=0.5), [1, 2, 3], np.zeros(2), None, rng).active) for _ in range(400)]
    assert len(set(drawn)) == 8
    assert 20 < drawn.count(()) < 80
    state = rng.bit_generator.state
    assert StylePass(StyleExploration(p=0.0), [1, 2, 3], np.zeros(2), None, rng).active == []
    assert rng.bit_generator.state == state
