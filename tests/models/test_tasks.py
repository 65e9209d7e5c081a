"""Dice and surface distances on numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from fedsim.common.errors import UserError
from fedsim.models.surfaces import largest_components, surface_distance
from fedsim.models.tasks import Segmentation, dice_of, rules_of, soft_dice_loss
from fedsim.settings import DataSettings


def maps(*values):
    """One row of pixels per image, one structure: [B, 1, 1, W]."""
    return torch.tensor(values)[:, None, None, :]


def test_dice_by_hand():
    """All pixels of the batch are summed before the quotient; an empty mask and an empty prediction have loss
    0. The measures are Dice of the thresholded masks, and the soft Dice loss of single images, .2 and .6. It is
    2 * 1 / (2 + 1), and 1 when both masks are empty."""
    assert soft_dice_loss(maps([0.8, 0.2]), maps([1, 0])).item() == pytest.approx(0.2, abs=1e-5)
    s, y = maps([0.8, 0.2], [0.6, 0.4]), maps([1, 0], [0, 1])
    assert soft_dice_loss(s, y).item() == pytest.approx(0.4, abs=1e-5)
    assert soft_dice_loss(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)).item() == 0
    logits, masks = torch.logit(maps([0.8, 0.2], [0.6, 0.4])), maps([1, 0], [0, 1])
    for batches in ([(logits, masks)], list(zip(logits.split(1), masks.split(1)))):
        assert Segmentation().measure(lambda x: x, batches) == pytest.approx((0.5, 0.4, 2), abs=1e-5)
    assert all(math.isnan(value) for value in Segmentation().measure(lambda x: x, [])[:2])
    truth, predicted = maps([1, 1, 0], [0, 0, 0]), maps([1, 0, 0], [0, 0, 0])
    assert dice_of(predicted, truth)[:, 0].tolist() == [pytest.approx(2 / 3), 1.0]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_largest_component_of_several_structures(layout):
    """Every mask of every image is reduced, in both memory layouts; the caller's masks stay as they are."""
    masks = torch.zeros(2, 2, 8, 8, dtype=torch.uint8)
    masks[:, :, 1:4, 1:4] = masks[:, :, 6, 6:7] = 1  # a square and a speck
    masks = masks.contiguous(memory_format=layout)
    assert largest_components(masks).sum((2, 3)).tolist() == [[9, 9], [9, 9]]
    assert masks.sum((2, 3)).tolist() == [[10, 10], [10, 10]]


def test_threshold():
    data = DataSettings(dataset="digit-masks", mask_threshold=0.75, largest_component=True)
    assert rules_of("segmentation", data).keep(torch.logit(maps([0.7, 0.8]))).flatten().tolist() == [0, 1]
    with pytest.raises(UserError, match="unknown task"):
        rules_of("detection", data)


def test_surface_distance():
    """Single pixels that are 3 and 4 apart have the distance 5, equal masks 0, and an empty mask the diagonal.

    The surface of a square has four pixels at 1 and four at sqrt(2) from its middle, whose own nearest one is at 1.
    """
    a, b, nothing = np.zeros((3, 6, 8), np.uint8)
    a[0, 0] = b[3, 4] = 1
    pairs = ((a, b), (a, a), (a, nothing), (nothing, nothing))
    assert [surface_distance(*pair) for pair in pairs] == [5, 0, 10, 0]
    middle, square = np.zeros((2, 9, 9), np.uint8)
    middle[4, 4] = square[3:6, 3:6] = 1
    assert surface_distance(middle, square) == pytest.approx((1 + 4 + 4 * math.sqrt(2)) / 9)
