"""RandConv, AugMix's step, Mixup, CutMix and JiGen: views, tiles, labels and losses."""

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_round import changed, digits_net, ready_round, small_round, step_of

from clients.objective.consistent_views import ConsistentViews
from clients.objective.jigsaw import PERMUTATIONS, TILES, Jigsaw, cut, draw_orders, grey_tiles, joined, shuffled
from clients.objective.mixtures import CutMix, MixUp
from clients.objective.random_convolution import RandomConvolution, convolved, random_kernel
from clients.parts import Batch
from clients.step.supervised import SupervisedStep
from clients.tools.losses import js_divergence
from fedsim.common.errors import UserError
from fedsim.models.inserts.jigsaw_head import JigsawHead
from fedsim.models.tasks import CLASSIFIES, Segmentation


@pytest.mark.parametrize(("logits", "divergence"), [
    ([[60.0, 0], [0, 60], [0, 60]], 0.636514), ([[60.0, 0]] * 3, 0), ((60 * np.eye(3)).tolist(), math.log(3)),
    (np.log([(0.7, 0.2, 0.1), (0.5, 0.3, 0.2), (0.1, 0.8, 0.1)]).tolist(), 0.169901),
])  # fmt: skip
def test_divergence_numbers(logits, divergence):
    assert js_divergence(list(torch.tensor(logits)[:, None])).item() == pytest.approx(divergence, abs=1e-6)


def test_kernels():
    """Deviations depend on the kernel's size, sizes are uniform, and means are zero; images keep their size."""
    generator = torch.Generator().manual_seed(0)
    for size, deviation in ((1, 0.57735), (3, 0.19245), (5, 0.11547), (7, 0.08248)):
        kernels = torch.stack([random_kernel(3, (size,), generator) for _ in range(600)])
        assert kernels.std().item() == pytest.approx(deviation, rel=0.04)
        assert kernels.shape[1:] == (3, 3, size, size)
        assert convolved(torch.rand(2, 3, 9, 11), kernels[0]).shape == (2, 3, 9, 11)
    drawn = [random_kernel(3, (1, 3, 5, 7), generator).shape[-1] for _ in range(400)]
    assert all(drawn.count(size) > 70 for size in (1, 3, 5, 7))
    generator, x = torch.Generator().manual_seed(0), torch.rand(2, 3, 8, 8)
    drawn = [RandomConvolution("img_p", p=0.25).view(x, generator).equal(x) for _ in range(400)]
    assert sum(drawn) / 400 == pytest.approx(0.25, abs=0.06)
    state = generator.get_state()
    view = RandomConvolution().view(x, generator)
    generator.set_state(state)
    alpha = float(torch.rand((), generator=generator))
    other = convolved(x, random_kernel(3, (1, 3, 5, 7), generator))
    assert torch.allclose(view, alpha * other + (1 - alpha) * x, atol=1e-6)


def one_step(part, size=28, insert=None):
    """(loss, network, round) after a step of a part on the same batch."""
    torch.manual_seed(0)
    net = digits_net(size, bottleneck=8)
    if insert:
        insert.apply(net)
    round, names = ready_round(net, size=size, lr=0.05), set(net.state_dict())
    loss = step_of(part, round)(round.data.batch(round.data.training_positions()))
    assert set(net.state_dict()) == names
    assert sum(len(group["params"]) for group in round.optimizer.param_groups) == len(list(net.parameters()))
    return loss, net, round


@pytest.mark.parametrize("part", [
    RandomConvolution("img_p", weight=0.0, p=1.0), ConsistentViews(weight=0.0), MixUp(0.0), CutMix(0.0),
])  # fmt: skip
def test_neutral_settings_are_the_supervised_step(part):
    (loss, net, _), (wanted, plain, _) = one_step(part), one_step(SupervisedStep())
    assert loss.equal(wanted)
    assert not changed(net, plain.state_dict())


def given(lam, *centre):
    """Draws that are given: lam, the batch in reverse order, and the centre of the box."""
    reverse, centre = lambda count: np.arange(count)[::-1].copy(), iter(centre)
    return SimpleNamespace(beta=lambda a, b: lam, permutation=reverse, integers=lambda size: next(centre))


def mixture(part, images, labels, drawn, task=CLASSIFIES, classes=2):
    return part.mixed(small_round(classes=classes, task=task), Batch(images, labels), drawn)


def test_mixtures_by_hand():
    """Mixup, lam = 1/4: .25 * 1 + .75 * 5 = 4 with the labels (.25, .75), and 2 with (.75, .25). CutMix, lam = 3/4: a
    box of side 4 / 2 = 2; around (0, 2) one of its rows is outside, so that 14 of 16 stay."""
    labels, images = torch.tensor([0, 1]), torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    mixed, soft = mixture(MixUp(), images, labels, given(0.25))
    assert mixed.flatten().tolist() == [4, 2]
    assert soft.tolist() == [[0.25, 0.75], [0.75, 0.25]]
    images = torch.tensor([1.0, 0.0]).view(2, 1, 1, 1).expand(2, 1, 4, 4)
    mixed, soft = mixture(CutMix(), images, labels, given(0.75, 0, 2))
    assert mixed[0, 0].tolist() == [[1, 0, 0, 1], [1] * 4, [1] * 4, [1] * 4]
    assert mixed[1].equal(1 - mixed[0])
    assert soft.tolist() == [[0.875, 0.125], [0.125, 0.875]]
    logits = torch.tensor([[0.0, math.log(3)]])
    assert CLASSIFIES.loss(logits, torch.tensor([[0.25, 0.75]])).item() == pytest.approx(0.562335, abs=1e-6)
    masks = torch.tensor([1, 0], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 1, 2)
    _, soft = mixture(MixUp(), torch.zeros(2, 1, 1, 2), masks, given(0.5), Segmentation(), classes=1)
    assert soft.unique().tolist() == [0.5]
    assert Segmentation().loss(torch.zeros(2, 1, 1, 2), soft).item() == pytest.approx(0.5, abs=1e-4)


ORDERED = torch.arange(9)[None]


def test_permutations_are_those_of_their_code():
    """Each has the largest minimal Hamming distance to the identity and to those before it; a seed breaks ties. The
    published list of JiGen has distances from 4 to 9; these are at least 7 places apart."""
    pool = np.array(list(itertools.permutations(range(TILES))), dtype=np.uint8)
    draw, least, found = random.Random(0), (pool != np.arange(TILES, dtype=np.uint8)).sum(1), []
    for _ in range(30):
        best = np.flatnonzero(least == least.max())
        chosen = pool[best[draw.randrange(len(best))]]
        found.append(tuple(chosen.tolist()))
        least = np.minimum(least, (pool != chosen).sum(1))
    assert list(PERMUTATIONS) == found
    table = np.array([tuple(range(9)), *PERMUTATIONS])
    assert (table[:, None] != table[None]).sum(2)[np.triu_indices(31, 1)].min() == 7


def test_tiles():
    """Counted row by row and joined; label 0 has probability .9 + .1 / 31; grey is the luma; the border is cut off."""
    x = torch.rand(2, 3, 12, 15)
    assert joined(cut(x)).equal(x)
    assert cut(x)[:, 5].equal(x[:, :, 4:8, 10:15])
    assert shuffled(cut(x), ORDERED.expand(2, 9)).equal(cut(x))
    x = joined(torch.arange(9.0).reshape(1, 9, 1, 1, 1).expand(1, 9, 1, 2, 2))
    for permutation in PERMUTATIONS[:5]:
        moved = shuffled(cut(x), torch.tensor([permutation]))
        assert moved[0, :, 0, 0, 0].tolist() == list(permutation)
        assert joined(shuffled(moved, torch.tensor([permutation]).argsort(1))).equal(x)
    orders = draw_orders(200_000, 0.9, 31, torch.Generator().manual_seed(0))
    share = torch.bincount(orders, minlength=31) / 200_000
    assert share[0].item() == pytest.approx(0.90323, abs=0.002)
    assert share[1:].min().item() == pytest.approx(0.1 / 31, rel=0.15)
    assert draw_orders(100, 1.0, 31, torch.Generator()).sum() == 0
    tiles, chosen = torch.rand(2, 9, 3, 4, 4), torch.zeros(2, 9, dtype=torch.bool)
    chosen[1, 4] = True
    done = grey_tiles(tiles, chosen)
    luma = 0.2989 * tiles[1, 4, 0] + 0.587 * tiles[1, 4, 1] + 0.114 * tiles[1, 4, 2]
    assert torch.allclose(done[1, 4], luma.expand(3, 4, 4))
    done[1, 4] = tiles[1, 4]
    assert done.equal(tiles)
    assert grey_tiles(tiles[:, :, :1], chosen).equal(tiles[:, :, :1])
    x, none = torch.rand(1, 3, 32, 32), torch.zeros(1, 9, dtype=torch.bool)
    assert Jigsaw().scrambled(x, ORDERED, none).equal(x[..., 1:31, 1:31])
    kept = Jigsaw(border="keep").scrambled(x, torch.tensor(PERMUTATIONS[:1]), none)
    assert kept[..., 0, :].equal(x[..., 0, :])
    assert not kept.equal(x)
    assert Jigsaw(border="keep").scrambled(x, ORDERED, none).equal(x)
    assert Jigsaw().scrambled(torch.rand(1, 1, 224, 224), ORDERED, none).shape[-2:] == (222, 222)


def test_jigen():
    """CE + alpha CE of the order; neutral settings are the supervised step bit for bit, if there is no border."""
    loss, net, round = one_step(Jigsaw(alpha=2.0, beta=0.0), 28, JigsawHead())
    plain, other, _ = one_step(Jigsaw(alpha=0.0, beta=0.0), 28, JigsawHead())
    assert loss.item() == pytest.approx(plain.item() + 2 * round.tallied()["jigsaw_loss"], rel=1e-5)
    assert changed(net, other.state_dict()) >= {"jigsaw.weight", "backbone.conv1.weight"}
    assert net.jigsaw.out_features == 31
    loss, net, _ = one_step(Jigsaw(alpha=0.0, beta=1.0, grey=0.0), 30, JigsawHead())
    wanted, plain, _ = one_step(SupervisedStep(), 30, JigsawHead())
    assert loss.equal(wanted)
    assert not changed(net, plain.state_dict())
    with pytest.raises(UserError, match="jigsaw cuts the images to 15 x 15 pixels, which this network does not accept"):
        one_step(Jigsaw(), 16, JigsawHead())
    one_step(Jigsaw(border="keep"), 16, JigsawHead())
