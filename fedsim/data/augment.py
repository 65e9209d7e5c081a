"""Batched augmentation on the tensor's own device: random crop, flip, colour jitter, greyscale.

Every image draws its own parameters from torch's global CPU generator; seed it with `torch.manual_seed`. The draws do
not depend on the device, and the code never waits for a CUDA result. The formulas are torchvision's (for floats), but
the order of the four jitter operations is drawn once per batch, and the crop is one `grid_sample`. The code is our own
because it takes about a third of the time of kornia (which also draws the order once per batch).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import FunctionType

import torch
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.data.image_ops import brightness, contrast, grey, hue, resized_crop, saturation
from fedsim.data.scaling import Scale
from fedsim.settings import DataSettings
from fedsim.settings.plugins import called, lookup, makes

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
STATISTICS: dict[str, Statistics] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mnist": ((0.1307,), (0.3081,)),
}


@dataclass(frozen=True)
class Augmentation:
    """x float [B,C,H,W] in [0,1] to the same shape and range. Fields at their defaults do nothing.

    `sizes` [B,2] are the heights and widths of the images before they were resized to squares. Crops are drawn on the
    originals (DomainBed's order, crop and then resize). None means that the images were square. One-channel images skip
    the colour operations.

    crop: the range of the area share of RandomResizedCrop (aspect ratio 3/4..4/3)
    centre: the share of both sides that a crop of the middle keeps (resize to 232, then 224 of the centre: 224/232)
    flip: the probability of a mirror image
    jitter: the strengths of brightness, contrast, saturation, hue
    jitter_share: the probability that an image is jittered
    grey: the probability of greyscale
    """

    crop: tuple[float, float] | None = None
    centre: float = 1.0
    flip: float = 0.0
    jitter: tuple[float, float, float, float] | None = None
    jitter_share: float = 1.0
    grey: float = 0.0

    @cached_property
    def does_nothing(self) -> bool:
        """Whether all fields are at their defaults."""
        return self == NOTHING

    def __call__(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        if self.does_nothing:
            return x
        without_masks = x[:, :0]
        augmented, _ = self.with_masks(x, without_masks, sizes)
        return augmented

    def with_masks(self, x: Tensor, masks: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Images and their masks [B,Q,H,W] of 0 and 1: both get the same geometry, and the images alone get colours.

        The draws are the same as without masks. A cropped mask is interpolated like its image and rounded at 1/2.
        """
        if self.does_nothing:
            return x, masks
        flipped = torch.rand(len(x)) < self.flip
        if self.crop or self.centre < 1:
            height, width = x.shape[-2:]
            boxes = self._boxes(len(x), height, width, sizes)
            x = resized_crop(x, boxes, flipped)
            if masks.shape[1]:
                cropped = resized_crop(masks.to(x.dtype), boxes, flipped)
                masks = (cropped > 0.5).to(masks.dtype)
        elif self.flip:
            x = _mirrored(x, flipped)
            masks = _mirrored(masks, flipped)
        return self._coloured(x), masks

    def _coloured(self, x: Tensor) -> Tensor:
        if x.shape[1] != 3:
            return x
        if self.jitter:
            is_jittered = torch.rand(len(x)) < self.jitter_share
            x = _on_some(x, is_jittered, self._jittered)
        is_grey = torch.rand(len(x)) < self.grey
        return _on_some(x, is_grey, lambda some: grey(some).expand_as(some))

    def _boxes(
        self,
        count: int,
        height: int,
        width: int,
        sizes: Tensor | None,
    ) -> Tensor:
        if self.crop:
            return draw_boxes(count, height, width, self.crop, sizes)
        side = self.centre
        border = (1 - side) / 2
        box = [border * height, border * width, side * height, side * width]
        return torch.tensor(box).expand(count, 4)

    def _jittered(self, x: Tensor) -> Tensor:
        assert self.jitter is not None
        strength = torch.tensor(self.jitter)[:, None]
        neutral = torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None]
        draws = torch.rand(4, len(x)) * 2 - 1
        factors = draws * strength + neutral
        for operation in torch.randperm(4).tolist():
            if self.jitter[operation]:
                factor = _per_image(factors[operation], x)
                x = JITTER[operation](x, factor)
        return x


WIDEST = 4 / 3  # aspect ratio of a crop


def draw_boxes(
    count: int,
    height: int,
    width: int,
    scale: tuple[float, float],
    sizes: Tensor | None = None,
) -> Tensor:
    """Crop boxes (top, left, height, width) in pixels, float [count,4], drawn as torchvision's RandomResizedCrop does.

    The area share is uniform in `scale` and the aspect ratio log-uniform in 3/4..4/3. The first of ten draws that fits
    is taken, else the middle of the image with the nearest of these ratios.

    `sizes` [count,2] are the heights and widths of images that were resized to height x width. The boxes are drawn on
    the originals, in whole pixels of the original scaled so that its shorter side is that of the square. The boxes are
    then resized as their image was, so that they need not be whole.
    """
    rows, columns = _originals(count, height, width, sizes)
    h, w, is_drawn = _crop_sizes(rows, columns, scale)
    top, left = _corners(rows - h, columns - w, is_drawn)
    boxes = torch.cat([top, left, h, w], 1)
    down, across = height / rows, width / columns
    return boxes * torch.cat([down, across, down, across], 1)


def _originals(
    count: int,
    height: int,
    width: int,
    sizes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(rows, columns) [count, 1] of the originals, scaled so that their shorter side is that of the square."""
    if sizes is None:
        rows = torch.full((count, 1), float(height))
        columns = torch.full((count, 1), float(width))
        return rows, columns
    scale = min(height, width) / sizes.amin(1, keepdim=True)
    rows, columns = (sizes * scale).round().split(1, dim=1)
    return rows, columns


def _crop_sizes(rows: Tensor, columns: Tensor, scale: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """(heights, widths, whether one of ten draws fits), all [count, 1], of crops of originals with these sides."""
    draws = (len(rows), 10)
    shares = torch.empty(draws).uniform_(*scale)
    area = shares * (rows * columns)
    widest = torch.tensor(WIDEST).log()
    ratio = torch.empty(draws).uniform_(-1, 1).mul_(widest).exp()
    widths = (area * ratio).sqrt().round()
    heights = (area / ratio).sqrt().round()
    fits_across = (widths > 0) & (widths <= columns)
    fits_down = (heights > 0) & (heights <= rows)
    fits = fits_across & fits_down
    first = fits.float().argmax(1, keepdim=True)
    is_drawn = fits.any(1, keepdim=True)
    middle_width = torch.minimum(columns, (rows * WIDEST).round())
    middle_height = torch.minimum(rows, (columns * WIDEST).round())
    w = torch.where(is_drawn, widths.gather(1, first), middle_width)
    h = torch.where(is_drawn, heights.gather(1, first), middle_height)
    return h, w, is_drawn


def _corners(free_rows: Tensor, free_columns: Tensor, fitting: Tensor) -> tuple[Tensor, Tensor]:
    """(top, left) [count, 1] of boxes: drawn where a box fits, else in the middle. The free ones are next to a box."""
    corner = torch.rand(2, len(fitting))[:, :, None]
    free = torch.stack([free_rows, free_columns])
    drawn = (corner * (free + 1)).floor()
    top, left = torch.where(fitting, drawn, free // 2)
    return top, left


def _per_image(values: Tensor, x: Tensor) -> Tensor:
    """Values [B] as [B,1,1,1] on x's device."""
    return values.to(x.device, non_blocking=True)[:, None, None, None]


def _mirrored(images: Tensor, flipped: Tensor) -> Tensor:
    """The images, or masks, mirrored where `flipped` [B] says so."""
    return torch.where(_per_image(flipped, images), images.flip(-1), images)


def _on_some(x: Tensor, chosen: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """x with `operation` applied to the images that `chosen` [B] (on the CPU) marks; x itself is not changed."""
    indices = chosen.nonzero()[:, 0]
    if not len(indices):
        return x
    if len(indices) == len(x):
        return operation(x)
    indices = indices.to(x.device, non_blocking=True)
    changed = operation(x.index_select(0, indices))
    return x.index_copy(0, indices, changed)


NOTHING = Augmentation()
JITTER = (brightness, contrast, saturation, hue)  # in the order of Augmentation.jitter
AUGMENTATIONS = {
    "none": NOTHING,
    "domainbed": Augmentation(crop=(0.7, 1.0), flip=0.5, jitter=(0.3, 0.3, 0.3, 0.3), grey=0.1),
    "csac": Augmentation(crop=(0.8, 1.0), flip=0.5, jitter=(0.4, 0.4, 0.4, 0.4), grey=0.1),
    "feddg-ga": Augmentation(crop=(0.7, 1.0), flip=0.5, jitter=(0.4, 0.4, 0.4, 0.4), grey=0.1),
    "flip-jitter": Augmentation(flip=0.5, jitter=(0.2, 0.2, 0.2, 0.2), jitter_share=0.5),  # gPerXAN's
    "fedsb": Augmentation(centre=224 / 232, flip=0.5, jitter=(0.3, 0.3, 0.3, 0.3), grey=0.1),
    "ccst": Augmentation(crop=(0.8, 1.0), flip=0.5),
    "flip": Augmentation(flip=0.5),
}


@dataclass(frozen=True)
class Normalization:
    """(x - mean) / std per channel; without a mean x is not changed."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        if not self.mean:
            return x
        mean, std = _statistics(self.mean, self.std, x.device, x.dtype)
        return (x - mean).div_(std)


@lru_cache(maxsize=8)
def _statistics(
    mean: tuple[float, ...],
    std: tuple[float, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Mean and std [1,C,1,1], kept on each device; normal tensors also when an evaluation is the first to ask, because
    autograd refuses those of its inference mode and some methods differentiate through the normalization (L2D)."""
    with torch.inference_mode(False):
        both = torch.tensor([mean, std], dtype=dtype).to(device)
        of_mean, of_std = both[:, None, :, None, None]
        return of_mean, of_std


def to_float(images: Tensor) -> Tensor:
    """uint8 [B,C,H,W] -> float32 in [0,1]."""
    return images.to(torch.float32).div_(255)


class Scaler:
    """Maps a batch float32 [B, ...] of the clients' values to what is trained on; a missing value becomes 0.

    shape: that of one example
    waits: a scale comes later (data.scale = "federated"), without which no batch is read. Otherwise the values are
    scaled already, or are not to be scaled
    """

    def __init__(self, shape: tuple[int, ...], waits: bool) -> None:
        self.shape, self.waits = shape, waits
        self.scale: Scale | None = None
        self._tensors: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def use(self, scale: Scale) -> None:
        """Takes this scale from now on."""
        if scale != self.scale:
            self.scale, self._tensors = scale, {}

    def __call__(self, x: Tensor) -> Tensor:
        if not self.waits:
            return x
        mean, std = self._of_device(x.device)
        return torch.nan_to_num((x - mean) / std, nan=0.0)

    def _of_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and std on a device; normal tensors also when an evaluation is the first to ask."""
        if self.scale is None:
            raise RuntimeError("the scale of the features is not known before the handshake has ended")
        if device not in self._tensors:
            mean, std = self.scale.arrays(self.shape)
            with torch.inference_mode(False):
                self._tensors[device] = (
                    torch.from_numpy(mean).to(device),
                    torch.from_numpy(std).to(device),
                )
        return self._tensors[device]


@dataclass(frozen=True)
class Transforms:
    """The operations on a batch between the array and the model: `read`, `augment` (training only), `normalize`.

    `read` makes float32 [B,C,H,W] in [0,1] of uint8; for tensors that are no images it standardizes them. The others
    take and give such floats. Objects can be pickled.
    """

    augment: Callable[[Tensor], Tensor]
    normalize: Normalization
    read: Callable[[Tensor], Tensor] = to_float


def check_joint(name: str) -> None:
    """Raises UserError when an augmentation cannot change an image and its masks together."""
    if not hasattr(find_augmentation(name), "with_masks"):
        raise UserError(
            f"data.augment {name!r} has no method with_masks(images, masks), which data with masks need; "
            f"use one of {', '.join(AUGMENTATIONS)}, or add it"
        )


def find_augmentation(name: str) -> Callable[[Tensor], Tensor]:
    """The augmentation of that name: a row of AUGMENTATIONS, of an installed package, or `module:name`.

    It is a function of float batches [B,C,H,W] in [0,1] that is declared to return a Tensor. It may be an object or
    class with such a method `__call__`, or a module of torch. Random draws come from torch's generator, which is seeded
    per client and round. UserError gives the nearest known name.
    """
    augmentation = lookup(name, AUGMENTATIONS, "augmentations", "data.augment: unknown")
    where = f"data.augment {name!r}"
    if not _gives_images(augmentation):
        raise UserError(
            f"{where} is not a function of batches of images that says what it returns; write "
            "`def NAME(images: Tensor) -> Tensor:`, or a class with such a __call__"
        )
    return called(augmentation, where) if isinstance(augmentation, type) else augmentation


def _gives_images(found: object) -> bool:
    """Whether a function, or the calls of an object or of a class's instances, are declared to return a tensor."""
    kind = found if isinstance(found, type) else type(found)
    if issubclass(kind, nn.Module):
        return True
    function = found if kind is FunctionType else kind.__call__
    return makes(function, Tensor)


def make_transforms(
    data: DataSettings,
    channels: int,
    weights: Statistics | None = None,
    read: Callable[[Tensor], Tensor] = to_float,
) -> Transforms:
    """Transforms of `data.augment` and `data.normalize` for images with `channels` channels, read from uint8.

    `weights` are mean and std with which the backbone's weights were trained, for data.normalize = "weights".
    Raises UserError for statistics of another number of channels (ImageNet 3, MNIST 1), or where there are none.
    """
    if data.normalize != "weights":
        mean, std = STATISTICS.get(data.normalize, ((), ()))
    elif weights is not None:
        mean, std = weights
    else:
        raise UserError("data.normalize = 'weights': the backbone has no weights with statistics; use 'none'")
    if mean and len(mean) != channels:
        kind = "colour" if len(mean) == 3 else "grey"
        raise UserError(
            f"data.normalize = {data.normalize!r} needs {kind} images, but {data.dataset} has {channels} channel(s); "
            "use data.normalize = 'none'"
        )
    augment = find_augmentation(data.augment)
    return Transforms(augment, Normalization(mean, std), read)
