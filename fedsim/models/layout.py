"""What other code needs to know about a backbone: a row of the catalog, with its stages and its feature maps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedsim.common.errors import UserError, first_line
from fedsim.models.weights import StateDict

STAGE_REDUCTIONS = {4: 1, 8: 2, 16: 3, 32: 4}  # image side / map side -> number of the stage, as in a ResNet
LEVEL_STAGES = (2, 3, 4)  # the stages whose outputs are CSAC's feature maps
Source = Callable[[nn.Module, int], StateDict]  # (backbone, image_size) -> its weights


class Statistics(NamedTuple):
    """Mean and standard deviation per channel of images in [0, 1], with which weights were trained."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Layout:
    """The feature width of a backbone and the paths of its stages and levels; paths are relative to the backbone.

    levels: the modules that output CSAC's feature maps, from shallow to deep; empty where there are none
    stages: the modules of stage 1, 2, ...; norm layers outside them belong to the stem
    level_margin: how many pixels smaller the common size of CSAC's projected levels is than the last level
    """

    feature_dim: int
    levels: tuple[str, ...] = ()
    stages: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    level_margin: int = 0


@dataclass(frozen=True)
class Backbone:
    """One row of the catalog.

    make: a function (image_size, channels) -> module with a forward pass that gives pooled features
    layout: the feature width and the paths of stages and levels, or a function (backbone, image_size) that finds them
    classifier: the prefixes of the original classifier's keys in weight files
    sources: where weights come from, by the word for them in `model.weights`
    statistics: the mean and deviation that the weights expect; None: images in [0, 1] without normalization
    input_size: the side in pixels of the images that the weights were trained on; 0: none
    licence: the licence of the published weights; empty: not known
    own_channels: it takes one-channel images without repeating them
    channels_last: it is faster in this memory layout on CPUs too
    maps: the forward pass gives features of every pixel, [B, D, H, W], for segmentation
    inner: the path of the module inside the backbone to which weights belong, the rest starts from the seed; empty: all
    text: (backbone, class names, prompt) -> the head that compares features with the names' texts; None: has no texts
    unclear: why a local weights file is refused, because the settings do not say how it was trained; empty: it is read
    finish: called when the weights are loaded and the head is made
    head: gives the head that comes with the module; None: a new linear one
    from_shape: makes the module for examples of any shape, also for tensors that are no images; None: images alone
    """

    make: Callable[[int, int], nn.Module]
    layout: Layout | Callable[[nn.Module, int], Layout]
    classifier: str | tuple[str, ...] = "fc."
    sources: Mapping[str, Source] = field(default_factory=dict)
    statistics: Statistics | None = None
    input_size: int = 0
    licence: str = ""
    own_channels: bool = False
    channels_last: bool = False
    maps: bool = False
    inner: str = ""
    text: Callable[[Any, Sequence[str], str], nn.Module] | None = None
    unclear: str = ""
    finish: Callable[[Any], None] | None = None
    head: Callable[[nn.Module], nn.Module] | None = None
    from_shape: Callable[[tuple[int, ...]], nn.Module] | None = None


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Inside the block the network is in eval mode; afterwards each module is in the mode in which it was."""
    training = [module for module in net.modules() if module.training]
    net.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def outputs_of(net: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Notes what the modules at these paths give in a forward pass inside the block, in the order in which they run."""
    outputs: dict[str, Tensor] = {}
    hooks = [
        net.get_submodule(path).register_forward_hook(lambda _module, _inputs, y, path=path: outputs.update({path: y}))
        for path in paths
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def survey(backbone: nn.Module, image_size: int, outputs: Mapping[str, int], name: str, channels: int = 3) -> Layout:
    """The layout of a backbone that names the modules `outputs` {path: image side / map side} as its feature maps.

    Stages 1, 2, 3, 4 end with the last output at 1/4, 1/8, 1/16 and 1/32 of the image's side, as in a ResNet. Modules
    before them are the stem, and a batch norm after the last output belongs to stage 4. One image of zeros is passed in
    eval mode, which gives the feature width and shows whether the size fits. A backbone without outputs that are maps
    [B, C, H, W] of falling size (a transformer) has no stages and no levels.

    Raises UserError for an image size that the backbone cannot take.
    """
    try:
        with evaluating(backbone), torch.inference_mode(), outputs_of(backbone, outputs) as maps:
            features = backbone(torch.zeros(1, channels, image_size, image_size))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"model.backbone: {name} cannot take images of {image_size} px ({first_line(error)}); "
                        "change data.image_size") from None  # fmt: skip
    if features.dim() != 2:
        shape = list(features.shape)
        raise UserError(f"model.backbone: {name} gives features of shape {shape} and not one vector per image")
    # The module that ends each stage is the last one with that resolution.
    ends = {STAGE_REDUCTIONS[size]: path for path, size in outputs.items() if size in STAGE_REDUCTIONS}
    if not ends or not _are_maps(outputs, maps):
        return Layout(features.shape[1])
    levels = tuple(ends[stage] for stage in LEVEL_STAGES if stage in ends)
    return Layout(features.shape[1], levels, _stages(backbone, outputs, ends))


def _are_maps(outputs: Mapping[str, int], given: Mapping[str, Tensor]) -> bool:
    """Whether the outputs are square maps, channels first, with sides that fall from the first to the last."""
    shapes = [getattr(given.get(path), "shape", torch.Size()) for path in outputs]
    if len(set(outputs.values())) < 2 or any(len(shape) != 4 or shape[2] != shape[3] for shape in shapes):
        return False
    sides = [shape[2] for shape in shapes]
    return sides == sorted(sides, reverse=True)


def _stages(backbone: nn.Module, outputs: Mapping[str, int], ends: Mapping[int, str]) -> dict[int, tuple[str, ...]]:
    """The modules of every stage, each up to the one that ends it."""
    stem_ends = {path for path, size in outputs.items() if size < min(STAGE_REDUCTIONS)}
    stages: dict[int, list[str]] = {stage: [] for stage in sorted(ends)}
    by_end = {path: stage for stage, path in ends.items()}
    waiting: list[str] = []  # modules since the last end
    for path in _frontier(backbone, set(outputs)):
        waiting.append(path)
        if path in by_end:
            first = by_end[path] == min(ends) and not stem_ends
            stages[by_end[path]] += waiting[-1:] if first else waiting
            waiting = []
        elif path in stem_ends:
            waiting = []
    stages[max(ends)] += [path for path in waiting if _has_batch_norm(backbone.get_submodule(path))]
    return {stage: tuple(paths) for stage, paths in stages.items()}


def _frontier(module: nn.Module, outputs: set[str], prefix: str = "") -> Iterator[str]:
    """Paths of the modules that are next to the outputs in the tree of modules, in the order of registration."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path not in outputs and any(output.startswith(path + ".") for output in outputs):
            yield from _frontier(child, outputs, path + ".")
        else:
            yield path


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(each, nn.BatchNorm2d) for each in module.modules())
