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


def test_soft_dice_is_over_the_whole_batch():
    """All pixels of the batch are summed before the quotient; an empty mask and an empty prediction have loss 0."""
    assert soft_dice_loss(maps([0.8, 0.2]), maps([1, 0])).item() == pytest.approx(0.2, abs=1e-5)
    s, y = maps([0.8, 0.2], [0.6, 0.4]), maps([1, 0], [0, 1])
    assert soft_dice_loss(s, y).item() == pytest.approx(0.4, abs=1e-5)
    assert soft_dice_loss(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)).item() == 0


def test_measure_does_not_depend_on_batches():
    """The measures are Dice of the thresholded masks, and the soft Dice loss of single images, .2 and .6."""
    logits, masks = torch.logit(maps([0.8, 0.2], [0.6, 0.4])), maps([1, 0], [0, 1])
    whole = Segmentation().measure(lambda x: x, [(logits, masks)])
    halves = Segmentation().measure(lambda x: x, [(logits[:1], masks[:1]), (logits[1:], masks[1:])])
    assert whole == pytest.approx((0.5, 0.4, 2), abs=1e-5)
    assert halves == pytest.approx(whole)
    assert all(math.isnan(value) for value in Segmentation().measure(lambda x: x, [])[:2])


def test_dice_of_masks():
    """It is 2 * 1 / (2 + 1), and 1 when both masks are empty."""
    truth, predicted = maps([1, 1, 0], [0, 0, 0]), maps([1, 0, 0], [0, 0, 0])
    assert dice_of(predicted, truth)[:, 0].tolist() == [pytest.approx(2 / 3), 1.0]


def test_threshold_and_largest_component():
    """At threshold 0.75, 0.7 is not a structure; of a column of two pixels and a single pixel, the column is kept."""
    data = DataSettings(dataset="digit-masks", mask_threshold=0.75, largest_component=True)
    rules = rules_of("segmentation", data)
    assert rules.keep(torch.logit(maps([0.7, 0.8]))).flatten().tolist() == [0, 1]
    masks = torch.tensor([[[[1, 0, 0], [1, 0, 1]]]])
    assert largest_components(masks).flatten().tolist() == [1, 0, 0, 1, 0, 0]
    with pytest.raises(UserError, match="unknown task"):
        rules_of("detection", data)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_largest_component_of_several_structures(layout):
    """Every mask of every image is reduced, in both memory layouts; the caller's masks stay as they are."""
    masks = torch.zeros(2, 2, 8, 8, dtype=torch.uint8)
    masks[:, :, 1:4, 1:4] = 1
    masks[:, :, 6, 6] = 1  # a speck
    masks = masks.contiguous(memory_format=layout)
    assert largest_components(masks).sum((2, 3)).tolist() == [[9, 9], [9, 9]]
    assert masks.sum((2, 3)).tolist() == [[10, 10], [10, 10]]


def test_surface_distance():
    """Single pixels that are 3 and 4 apart have the distance 5, equal masks 0, and an empty mask the diagonal."""
    a, b, nothing = np.zeros((3, 6, 8), np.uint8)
    a[0, 0] = b[3, 4] = 1
    assert surface_distance(a, b) == 5
    assert surface_distance(a, a) == 0
    assert surface_distance(a, nothing) == 10
    assert surface_distance(nothing, nothing) == 0
    square, larger = np.zeros((2, 9, 9), np.uint8)
    square[4, 4] = 1
    larger[3:6, 3:6] = 1  # its surface: four pixels at 1, four at sqrt(2); the pixel's own nearest is at 1
    expected = (1 + 4 + 4 * math.sqrt(2)) / 9
    assert surface_distance(square, larger) == pytest.approx(expected)
