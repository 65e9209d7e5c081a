"""Dice and surface distances on numbers by hand; U-Nets: sizes, gradients, norms, and weights of the encoder."""

import math

import networks
import numpy as np
import pytest
import torch
from networks import saved

from fedsim.common.errors import UserError
from fedsim.models import build_model
from fedsim.models.surfaces import largest_components, surface_distance
from fedsim.models.tasks import Segmentation, dice_of, rules_of, soft_dice_loss
from fedsim.settings import DataSettings, ModelSettings, TrainSettings


def maps(*values):
    """One row of pixels per image, one structure: [B, 1, 1, W]."""
    return torch.tensor(values)[:, None, None, :]


def test_dice_and_thresholds_by_hand():
    """All pixels of the batch are summed before the quotient; an empty mask and an empty prediction have loss
    0. The measures are Dice of the thresholded masks, and the soft Dice loss of single images, .2 and .6."""
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
    data = DataSettings(dataset="digit-masks", mask_threshold=0.75, largest_component=True)
    assert rules_of("segmentation", data, TrainSettings()).keep(torch.logit(maps([0.7, 0.8]))).flatten().tolist() == [
        0,
        1,
    ]
    with pytest.raises(UserError, match="unknown task"):
        rules_of("detection", data, TrainSettings())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_largest_component_of_several_structures(layout):
    """Every mask of every image is reduced, in both memory layouts; the caller's masks stay as they are."""
    masks = torch.zeros(2, 2, 8, 8, dtype=torch.uint8)
    masks[:, :, 1:4, 1:4] = masks[:, :, 6, 6:7] = 1  # a square and a speck
    masks = masks.contiguous(memory_format=layout)
    assert largest_components(masks).sum((2, 3)).tolist() == [[9, 9], [9, 9]]
    assert masks.sum((2, 3)).tolist() == [[10, 10], [10, 10]]


def test_surface_distance():
    """Single pixels that are 3 and 4 apart have the distance 5, equal masks 0, and an empty mask the diagonal. The
    surface of a square has four pixels at 1 and four at sqrt(2) from its middle, whose own nearest one is at 1."""
    a, b, nothing = np.zeros((3, 6, 8), np.uint8)
    a[0, 0] = b[3, 4] = 1
    pairs = ((a, b), (a, a), (a, nothing), (nothing, nothing))
    assert [surface_distance(*pair) for pair in pairs] == [5, 0, 10, 0]
    middle, square = np.zeros((2, 9, 9), np.uint8)
    middle[4, 4] = square[3:6, 3:6] = 1
    assert surface_distance(middle, square) == pytest.approx((1 + 4 + 4 * math.sqrt(2)) / 9)


def build(backbone="unet-resnet18", norm=None, **more):
    return build_model(ModelSettings(backbone=backbone, **more), 2, 3, 32, norm=norm, task=Segmentation())


@pytest.mark.parametrize(("backbone", "size", "width"), [
    ("unet", 33, 32), ("unet-small", 32, 16), ("unet-resnet18", 32, 32),
    pytest.param("unet-densenet121", 36, 32, marks=pytest.mark.slow),
])  # fmt: skip
def test_every_pixel_has_features_and_logits_and_every_weight_a_gradient(backbone, size, width):
    net, x = build(backbone), torch.randn(2, 3, size, size)
    *levels, features, logits = networks.shapes(net, 2, 3, size, size)
    assert (features, logits) == ((2, width, size, size), (2, 2, size, size))
    assert [side for _, side, _ in levels] == sorted({side for _, side, _ in levels}, reverse=True)
    net.train()(x).square().sum().backward()
    assert not [name for name, parameter in net.named_parameters() if parameter.grad is None]
    if backbone == "unet-resnet18":  # a distant change affects a pixel only through the encoder's deepest map
        assert not net.backbone.encoder.layer1._forward_hooks
        image = torch.randn(1, 3, 48, 48)
        changed = image.clone()
        changed[..., 40:, 40:] += 1
        with torch.no_grad():
            moved = (net.eval()(changed) - net(image)).abs().amax(1)[0]
        assert moved[44, 44] > moved[2, 2] > 0


def test_published_weights_go_into_the_encoder(tmp_path):
    published, file = networks.build("resnet18", seed=5).backbone.state_dict(), tmp_path / "w.safetensors"
    net = build(weights=saved(file, published)).backbone
    assert net.encoder.state_dict().keys() <= published.keys()
    assert all(torch.equal(value, published[name]) for name, value in net.encoder.state_dict().items())
    whole = {f"backbone.{name}": value for name, value in net.state_dict().items()}
    again = build(weights=saved(file, whole)).backbone.state_dict()
    assert all(torch.equal(again[name], value) for name, value in net.state_dict().items())
