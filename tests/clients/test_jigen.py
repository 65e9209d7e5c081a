"""JiGen: tiles, permutations, labels and losses."""

import itertools
import random

import numpy as np
import pytest
import torch
from small_round import changed, digits_net, ready_round, step_of

from clients.objective.jigsaw import PERMUTATIONS, TILES, Jigsaw, cut, draw_orders, grey_tiles, joined, shuffled
from clients.step.supervised import SupervisedStep
from fedsim.common.errors import UserError
from fedsim.models.inserts.jigsaw_head import JigsawHead

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


def test_tiles_are_counted_row_by_row_and_joined():
    """Tiles 0..8 under P show P[t]; the inverse restores them; in order they are the image, bit for bit."""
    x = torch.rand(2, 3, 12, 15)
    assert joined(cut(x)).equal(x)
    assert cut(x)[:, 5].equal(x[:, :, 4:8, 10:15])
    assert shuffled(cut(x), ORDERED.expand(2, 9)).equal(cut(x))
    x = joined(torch.arange(9.0).reshape(1, 9, 1, 1, 1).expand(1, 9, 1, 2, 2))
    for permutation in PERMUTATIONS[:5]:
        moved = shuffled(cut(x), torch.tensor([permutation]))
        assert moved[0, :, 0, 0, 0].tolist() == list(permutation)
        assert joined(shuffled(moved, torch.tensor([permutation]).argsort(1))).equal(x)


def test_label_frequencies():
    """Label 0 has probability .9 + .1 / 31, the others .1 / 31 each."""
    orders = draw_orders(200_000, 0.9, 31, torch.Generator().manual_seed(0))
    share = torch.bincount(orders, minlength=31) / 200_000
    assert share[0].item() == pytest.approx(0.90323, abs=0.002)
    assert share[1:].min().item() == pytest.approx(0.1 / 31, rel=0.15)
    assert draw_orders(100, 1.0, 31, torch.Generator()).sum() == 0


def test_grey_tiles():
    """Only the chosen tiles are grey: all their channels are the luma."""
    tiles, chosen = torch.rand(2, 9, 3, 4, 4), torch.zeros(2, 9, dtype=torch.bool)
    chosen[1, 4] = True
    done = grey_tiles(tiles, chosen)
    luma = 0.2989 * tiles[1, 4, 0] + 0.587 * tiles[1, 4, 1] + 0.114 * tiles[1, 4, 2]
    assert torch.allclose(done[1, 4], luma.expand(3, 4, 4))
    done[1, 4] = tiles[1, 4]
    assert done.equal(tiles)
    assert grey_tiles(tiles[:, :, :1], chosen).equal(tiles[:, :, :1])


def test_border():
    """By default it is cut off, so that 222 of 224 pixels remain; or it is kept."""
    x, none = torch.rand(1, 3, 32, 32), torch.zeros(1, 9, dtype=torch.bool)
    assert Jigsaw().scrambled(x, ORDERED, none).equal(x[..., 1:31, 1:31])
    kept = Jigsaw(border="keep").scrambled(x, torch.tensor(PERMUTATIONS[:1]), none)
    assert kept[..., 0, :].equal(x[..., 0, :])
    assert not kept.equal(x)
    assert Jigsaw(border="keep").scrambled(x, ORDERED, none).equal(x)
    assert Jigsaw().scrambled(torch.rand(1, 1, 224, 224), ORDERED, none).shape[-2:] == (222, 222)


def one_step(part, size):
    """(loss, network, round) after one step of a part."""
    torch.manual_seed(0)
    net = digits_net(size)
    JigsawHead().apply(net)
    round = ready_round(net, size=size, lr=0.05)
    return step_of(part, round)(round.data.batch(round.data.training_positions())), net, round


def test_a_network_of_one_image_size_is_refused():
    """Without its border an image of 16 pixels has 15, which the small network (and a ViT) does not accept."""
    with pytest.raises(UserError, match="jigsaw cuts the images to 15 x 15 pixels, which this network does not accept"):
        one_step(Jigsaw(), 16)
    one_step(Jigsaw(border="keep"), 16)


def test_neutral_settings_are_the_supervised_step():
    """alpha = 0, beta = 1 and no grey tiles give the same numbers bit for bit, if there is no border."""
    loss, net, _ = one_step(Jigsaw(alpha=0.0, beta=1.0, grey=0.0), 30)
    wanted, plain, _ = one_step(SupervisedStep(), 30)
    assert loss.equal(wanted)
    assert not changed(net, plain.state_dict())


def test_both_losses_train_the_features():
    """The loss is CE + alpha CE of the order; both heads are trained."""
    loss, net, round = one_step(Jigsaw(alpha=2.0, beta=0.0), 28)
    plain, other, _ = one_step(Jigsaw(alpha=0.0, beta=0.0), 28)
    assert loss.item() == pytest.approx(plain.item() + 2 * round.tallied()["jigsaw_loss"], rel=1e-5)
    assert changed(net, other.state_dict()) >= {"jigsaw.weight", "backbone.conv1.weight"}
    assert net.jigsaw.out_features == 31
