"""Batched augmentation: each operation is compared with torchvision's, then properties of the presets are tested."""

import pytest
import torch
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as TF

from fedsim.common.errors import UserError
from fedsim.data.augment import AUGMENTATIONS, Augmentation, _statistics, draw_boxes, make_transforms, to_float
from fedsim.data.image_ops import brightness, contrast, grey, hue, resized_crop, saturation
from fedsim.settings import DataSettings


@pytest.fixture
def batch() -> torch.Tensor:
    x = torch.rand(6, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    x[0, :, :4] = 0.5  # grey, black, white and two-equal-channel pixels
    x[0, :, 4:6] = 0.0
    x[0, :, 6:8] = 1.0
    x[0, 1, 8:10] = x[0, 0, 8:10]
    return x


def seeded(function, *given):
    torch.manual_seed(3)
    return function(*given)


FACTORS = (0.0, 0.6, 0.9, 1.0, 1.2, 1.4)


@pytest.mark.parametrize(("operation", "reference", "values"), [
    (brightness, TF.adjust_brightness, FACTORS), (contrast, TF.adjust_contrast, FACTORS),
    (saturation, TF.adjust_saturation, FACTORS), (hue, TF.adjust_hue, (-0.5, -0.3, -0.1, 0.0, 0.2, 0.5)),
    (lambda images, _: grey(images), lambda image, _: TF.rgb_to_grayscale(image, 1), FACTORS),
])  # fmt: skip
def test_colours_equal_torchvisions(batch, operation, reference, values):
    before = batch.clone()
    ours = operation(batch, torch.tensor(values)[:, None, None, None])
    theirs = torch.stack([reference(image, value) for image, value in zip(batch, values)])
    torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=0)
    assert (batch == before).all()


def test_crop_and_flip_equal_torchvision(batch):
    boxes = torch.tensor(
        [[0, 0, 20, 20], [2, 3, 15, 16], [5, 0, 15, 20], [1, 1, 17, 13], [0, 4, 20, 16], [6, 6, 14, 14]]
    )
    flipped = torch.tensor([False, True, False, True, False, True])
    ours = resized_crop(batch, boxes.float(), flipped)
    for image, out, box, flip in zip(batch, ours, boxes.tolist(), flipped.tolist()):
        expected = TF.resized_crop(image, *box, [20, 20], antialias=False)
        torch.testing.assert_close(out, expected.flip(-1) if flip else expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(224, 224), (480, 640), (300, 1000)])
def test_boxes_are_distributed_like_torchvisions_of_the_originals(height, width):
    """A crop is squeezed when it becomes a square: at 640 x 480 by 1.01, 1.21 and 1.33 (5, 50 and 95 %)."""
    torch.manual_seed(0)
    sizes = torch.tensor([[height, width]]).expand(2000, 2) if height != width else None
    boxes, image = draw_boxes(2000, 224, 224, (0.7, 1.0), sizes), torch.empty(3, height, width)
    assert sizes is not None or (boxes == boxes.round()).all()
    top, left, heights, widths = boxes.T
    assert ((top >= 0) & (left >= 0) & (top + heights <= 224.001) & (left + widths <= 224.001)).all()
    ours = (boxes * torch.tensor([height, width, height, width]) / 224).double()
    drawn = [RandomResizedCrop.get_params(image, [0.7, 1.0], [3 / 4, 4 / 3]) for _ in range(2000)]
    theirs = torch.tensor(drawn).double()  # top, left, height, width
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 0.01 * max(height, width)).all()
    assert ((ours.std(0) - theirs.std(0)).abs() < 0.01 * max(height, width)).all()
    marks = torch.tensor([0.05, 0.5, 0.95], dtype=torch.double)
    squeeze = [(box[:, 3] / box[:, 2]).quantile(marks) for box in (ours, theirs)]
    torch.testing.assert_close(squeeze[0], squeeze[1], atol=0.02, rtol=0)
    if width == 640:
        torch.testing.assert_close(squeeze[0], torch.tensor([1.01, 1.21, 1.33]).double(), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_presets_keep_shape_range_and_input_and_repeat_by_seed(batch, name):
    x = batch[:, :1].contiguous()
    before, augment = x.clone(), make_transforms(DataSettings(augment=name), 1).augment
    first = seeded(augment, x)
    assert (first.shape, first.dtype) == (x.shape, torch.float32)
    assert 0 <= first.min() <= first.max() <= 1 + 1e-6
    assert torch.equal(first, seeded(augment, x))
    assert torch.equal(x, before)
    assert torch.equal(first, x) == (name == "none")
    if name == "domainbed":  # square images are cropped as without sizes
        assert torch.equal(seeded(augment, x, torch.full((6, 2), 227)), first)


@pytest.mark.parametrize(("augment", "low", "high"), [
    (AUGMENTATIONS["flip"], 150, 250), (Augmentation(grey=0.1), 340, 380),
    (Augmentation(jitter=(0.2, 0.2, 0.2, 0.2), jitter_share=0.5), 160, 240),
])  # fmt: skip
def test_shares_of_images_that_stay_as_they_are(augment, low, high):
    x = torch.rand(400, 3, 4, 4)
    out = seeded(augment, x)
    kept = (out == x).flatten(1).all(1)
    assert low < kept.sum() < high
    if augment is AUGMENTATIONS["flip"]:
        assert torch.equal(out[~kept], x[~kept].flip(-1))
    if augment.grey:
        assert out[~kept].std(1).max() < 1e-6


def test_scaling_and_imagenet_normalization():
    images = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 3, 2, 2)
    assert to_float(images).unique().tolist() == [0.0, 1.0]
    black = make_transforms(DataSettings(normalize="imagenet"), 3).normalize(to_float(images))[0, :, 0, 0]
    assert black.tolist() == pytest.approx([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225], rel=1e-5)
    digits = make_transforms(DataSettings(normalize="mnist"), 1).normalize(to_float(images[:, :1]))[:, 0, 0, 0]
    assert digits.tolist() == pytest.approx([-0.1307 / 0.3081, (1 - 0.1307) / 0.3081], rel=1e-5)
    with pytest.raises(UserError, match="'mnist' needs grey images, but pacs has 3"):
        make_transforms(DataSettings(dataset="pacs", normalize="mnist"), 3)
    assert torch.equal(make_transforms(DataSettings(), 3).normalize(to_float(images)), to_float(images))
    with pytest.raises(UserError, match=r"needs colour images, but digits has 1 channel"):
        make_transforms(DataSettings(normalize="imagenet"), 1)


def test_the_centre_of_fedsb_on_a_ramp():
    """Pixel i of a ramp of 58 becomes the value at 58/2 + (i - 28.5) 56/58: the middle 56 of 58, at full size."""
    ramp = (torch.arange(58.0) / 58).expand(1, 1, 58, 58).contiguous()
    expected = (28.5 + (torch.arange(58.0) - 28.5) * (56 / 58)) / 58
    found = Augmentation(centre=56 / 58)(ramp)[0, 0, 20]
    assert torch.allclose(found[1:-1], expected[1:-1], atol=1e-5)  # the border pixels stay within the crop
    assert AUGMENTATIONS["fedsb"].centre == 224 / 232
    flat = torch.rand(8, 3, 1, 1).expand(8, 3, 16, 16).contiguous()
    assert torch.allclose(AUGMENTATIONS["ccst"](flat), flat, atol=1e-6)  # it leaves colours
    assert not torch.allclose(AUGMENTATIONS["fedsb"](flat), flat, atol=1e-3)


def test_a_normalisation_that_an_evaluation_made_first_can_be_differentiated():
    """L2D failed in its first step on every data set with a normalization, because round 0 is evaluated before it."""
    normalize = make_transforms(DataSettings(normalize="mnist"), 1).normalize
    _statistics.cache_clear()
    with torch.inference_mode():
        normalize(torch.rand(2, 1, 4, 4))
    images = torch.rand(2, 1, 4, 4, requires_grad=True)
    normalize(images).sum().backward()
    torch.testing.assert_close(images.grad, torch.full_like(images, 1 / 0.3081))
