"""Mixup and CutMix by hand: images, labels, and losses with soft labels."""

import math

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round

from clients.objective.mixtures import CutMix, MixUp
from clients.parts import Batch
from fedsim.models.tasks import CLASSIFIES, Segmentation


class Drawn:
    """Draws that are given: lam, the batch in reverse order, and the centre of the box."""

    def __init__(self, lam, *centre):
        self.lam, self.centre = lam, list(centre)

    def beta(self, a, b):
        return self.lam

    def permutation(self, count):
        return np.arange(count)[::-1].copy()

    def integers(self, size):
        return self.centre.pop(0)


def mixture(part, images, labels, drawn, task=CLASSIFIES, classes=2):
    round = small_round(small_data(colour_images(3)), classes=classes, task=task)
    return part.mixed(round, Batch(images, labels), drawn)


def test_mixup_by_hand():
    """lam = 1/4: .25 * 1 + .75 * 5 = 4 with the labels (.25, .75), and 2 with (.75, .25)."""
    images, soft = mixture(MixUp(), torch.tensor([1.0, 5.0]).view(2, 1, 1, 1), torch.tensor([0, 1]), Drawn(0.25))
    assert images.flatten().tolist() == [4, 2]
    assert soft.tolist() == [[0.25, 0.75], [0.75, 0.25]]


def test_cutmix_by_hand():
    """lam = 3/4 gives a box of side 4 / 2 = 2; around (0, 2) one of its rows is outside, so that 14 of 16 stay."""
    images = torch.tensor([1.0, 0.0]).view(2, 1, 1, 1).expand(2, 1, 4, 4)
    mixed, soft = mixture(CutMix(), images, torch.tensor([0, 1]), Drawn(0.75, 0, 2))
    assert mixed[0, 0].tolist() == [[1, 0, 0, 1], [1] * 4, [1] * 4, [1] * 4]
    assert mixed[1].equal(1 - mixed[0])
    assert soft.tolist() == [[0.875, 0.125], [0.125, 0.875]]


def test_losses_with_soft_labels():
    """p = y = (1/4, 3/4): the entropy .562335. Masks of .5 where p = .5: 1 - 2 * 4 * .25 / (2 + 2) = .5."""
    logits = torch.tensor([[0.0, math.log(3)]])
    assert CLASSIFIES.loss(logits, torch.tensor([[0.25, 0.75]])).item() == pytest.approx(0.562335, abs=1e-6)
    masks = torch.tensor([1, 0], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 1, 2)
    _, soft = mixture(MixUp(), torch.zeros(2, 1, 1, 2), masks, Drawn(0.5), Segmentation(), classes=1)
    assert soft.unique().tolist() == [0.5]
    assert Segmentation().loss(torch.zeros(2, 1, 1, 2), soft).item() == pytest.approx(0.5, abs=1e-4)


def test_without_mixtures_the_objective_is_the_tasks_loss():
    round = small_round(small_data(colour_images(3)))
    assert all(part.begin(round) == round.forward for part in (MixUp(0.0), CutMix(0.0)))
