"""Makes a backbone and a head of any nn.Module whose last layer is linear: a user's own network, as he wrote it.

    model.backbone = "mynets:Net"          a class that derives from nn.Module, or a function `-> nn.Module`

The head is the module's attribute `head`, where that is a Linear, otherwise the last Linear that it has. Everything
before it is the backbone, which gives the head's input as features.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fedsim.common.errors import UserError, first_line
from fedsim.models.layout import Backbone, Layout, evaluating, survey
from fedsim.models.layout import outputs_of as maps_of

HEAD = "own_head"  # key of the head in the backbone's __dict__, until the network has taken it
SHAPE = "own_shape"  # key of the shape of an example, likewise
MOST_LEVELS = 3
SAMPLES = 3  # inputs of noise with which a network is compared with its two halves
# Networks that Python code of this process gave as objects, by the name that settings have for them.
GIVEN: dict[str, Backbone] = {}


def module_row(make: Callable[[], nn.Module], name: str) -> Backbone:
    """The row of the catalog for a module that `make` makes, or of which `make` is the class; name: in messages."""

    def of_images(image_size: int, channels: int) -> nn.Module:
        return _headless(make, name, (channels, image_size, image_size))

    return Backbone(
        of_images,
        partial(_layout, name),
        own_channels=True,
        head=lambda backbone: backbone.__dict__.pop(HEAD),
        from_shape=partial(_headless, make, name),
    )


def copies_of(module: nn.Module) -> Callable[[], nn.Module]:
    """A function that makes equal modules with the weights that this one has now."""
    original = copy.deepcopy(module).cpu()
    return lambda: copy.deepcopy(original)


def _headless(make: Callable[[], nn.Module], name: str, shape: tuple[int, ...]) -> nn.Module:
    """The module with the identity in the place of its head, which is kept next to it.

    Raises UserError without a Linear, for inputs that the module does not take, and where something follows the head.
    """
    module = make()
    path = _head_path(module, name)
    sample = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(0), device="cpu")
    logits = _outputs(module, sample, name)
    parent, _, last = path.rpartition(".")
    head: nn.Module = module.get_submodule(path)
    setattr(module.get_submodule(parent), last, nn.Identity())
    features = _outputs(module, sample, name)
    halves = head(features) if features.dim() == 2 and features.shape[1] == head.in_features else None
    if halves is None or halves.shape != logits.shape or not torch.allclose(halves, logits, rtol=1e-4, atol=1e-5):
        raise UserError(f"model: {name} does something with the outputs of its last Linear, {path!r}; its forward pass "
                        "must return them as logits [B, classes]")  # fmt: skip
    module.__dict__[HEAD], module.__dict__[SHAPE] = head, shape
    return module


def _head_path(module: nn.Module, name: str) -> str:
    """The path of the module's head."""
    if isinstance(getattr(module, "head", None), nn.Linear):
        return "head"
    paths = [path for path, layer in module.named_modules() if isinstance(layer, nn.Linear) and path]
    if not paths:
        raise UserError(
            f"model: {name} has no Linear, which would be its head: end it with nn.Linear(features, classes)"
        )
    return paths[-1]


@torch.no_grad()
def _outputs(module: nn.Module, sample: Tensor, name: str) -> Tensor:
    """What a module gives for some inputs in eval mode; UserError where it cannot take them."""
    try:
        with evaluating(module):
            outputs = module(sample)
    except Exception as error:  # the user's own code may raise any error
        shape = list(sample.shape[1:])
        raise UserError(f"model: {name} cannot take inputs of the shape {shape} ({first_line(error)})") from error
    if not isinstance(outputs, Tensor):
        raise UserError(f"model: {name} returns {type(outputs).__name__}; it must return logits [B, classes]")
    return outputs


def _layout(name: str, backbone: nn.Module, image_size: int) -> Layout:
    """The width of the features, and the stages and levels of a convolutional network, by the sizes of its maps."""
    head, shape = backbone.__dict__[HEAD], backbone.__dict__.pop(SHAPE)
    has_maps = any(isinstance(layer, nn.Conv2d) for layer in backbone.modules())
    if not has_maps or len(shape) != 3 or shape[1] != shape[2]:
        return Layout(head.in_features)
    reductions = _reductions(backbone, shape)
    layout = survey(backbone, image_size, reductions, name, shape[0])
    falls = list(reductions.values()) == sorted(reductions.values())
    return layout if layout.stages or not falls else _by_size(layout, reductions)


def _reductions(backbone: nn.Module, shape: tuple[int, ...]) -> dict[str, int]:
    """{path: image side / map side} of the blocks that give maps, in the order in which they run."""
    paths = list(dict.fromkeys(_blocks(backbone)))
    with evaluating(backbone), torch.inference_mode(), maps_of(backbone, paths) as maps:
        backbone(torch.zeros(1, *shape))
    return {path: shape[1] // y.shape[2] for path, y in maps.items() if isinstance(y, Tensor) and y.dim() == 4}


def _by_size(layout: Layout, reductions: Mapping[str, int]) -> Layout:
    """The layout of a small network, which has no maps at 1/4 of the image's side or less: a stage for each size."""
    by_size: dict[int, list[str]] = {}
    for path, size in reductions.items():
        by_size.setdefault(size, []).append(path)
    stages = {number: tuple(paths) for number, paths in enumerate(by_size.values(), 1)}
    levels = tuple(paths[-1] for paths in by_size.values())
    return replace(layout, levels=levels[-MOST_LEVELS:], stages=stages)


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The paths of a module's children, those inside a Sequential one by one."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.Sequential):
            yield from _blocks(child, f"{path}.")
        else:
            yield path


def own_names(module: nn.Module) -> dict[str, str]:
    """The module's own name of each tensor of the network that `module_row` makes of it."""
    path = _head_path(module, type(module).__name__)
    names = {}
    for name in module.state_dict():
        of_head = name.startswith(f"{path}.")
        names[f"head.{name.removeprefix(path + '.')}" if of_head else f"backbone.{name}"] = name
    return names


def outputs_of(module: nn.Module) -> int:
    """The number of the module's logits: the outputs of its head."""
    head: nn.Module = module.get_submodule(_head_path(module, type(module).__name__))
    assert isinstance(head, nn.Linear)
    return head.out_features
