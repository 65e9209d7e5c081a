"""Builds a network from the settings: backbone, head, initial weights, norm layers, and which tensors are trained."""

import fnmatch
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.common.seeding import stream_seed
from fedsim.models.backbones import BACKBONES, Backbone, find_backbone
from fedsim.models.layout import Layout
from fedsim.models.net import Net
from fedsim.models.norms.base import Norm
from fedsim.models.tasks import CLASSIFIES, TaskRules
from fedsim.models.tensor_backbones import KINDS
from fedsim.models.timm_family import fit_position_embedding
from fedsim.models.weights import StateDict, load_backbone, read_weight_file
from fedsim.parts.facts import Fact
from fedsim.settings import ModelSettings
from fedsim.settings.model import WEIGHT_WORDS


def initial_state(model: ModelSettings, row: Backbone, backbone: nn.Module, image_size: int) -> StateDict | None:
    """The state that `model.weights` names; None for random weights, UserError for weights that are not known."""
    if model.weights == "none":
        return None
    backbone = backbone.get_submodule(row.inner)
    if model.weights in row.sources:
        return row.sources[model.weights](backbone, image_size)
    if model.weights in WEIGHT_WORDS:
        choices = ", ".join(["none", *row.sources])
        raise UserError(f"model.weights: there are no ImageNet weights ({model.weights!r}) for {model.backbone}; "
                        f"use {choices} or a local file")  # fmt: skip
    if row.unclear:
        raise UserError(row.unclear)
    return read_weight_file(model.weights)


def _fit_position_embedding(backbone: nn.Module, state: StateDict, image_size: int) -> StateDict:
    """Interpolates the position embedding of a ViT when the file was made for another image size."""
    key = "encoder.pos_embedding"
    if key not in state:
        return fit_position_embedding(backbone, state, image_size)
    if state[key].shape == backbone.get_parameter(key).shape:
        return state
    from torchvision.models.vision_transformer import interpolate_embeddings

    return interpolate_embeddings(image_size, backbone.patch_size, dict(state))


def build_model(
    model: ModelSettings,
    classes: int,
    channels: int,
    image_size: int,
    norm: Norm | None = None,
    seed: int = 0,
    task: TaskRules = CLASSIFIES,
    names: Sequence[str] = (),
    shape: tuple[int, ...] = (),
) -> Net:
    """The network of the settings, equal for equal seeds. torch's global generator is not changed.

    model: backbone, initial weights and bottleneck width
    classes: the number of outputs of the head
    channels: 1 or 3; torchvision's backbones get one-channel images repeated to three
    image_size: the side of the square images in pixels; for a ViT a multiple of its patch
    norm: a norm part with `apply(net)`; None keeps the backbone's batch norm
    seed: the seed of the run, of which the stream "init" is used
    task: makes the head, and says whether the backbone must give maps
    names: the names of the classes, which model.head = "text" reads
    shape: that of one example which is a tensor and no image; () for images

    On small images ResNet keeps the 7x7 stem with stride 2 of the papers at every size. AlexNet's poolings are padded
    by one below 63 px, and DenseNet's transitions keep odd borders below 32 px, because their maps would become empty.

    Raises UserError for an unknown backbone, weights that do not fit, or a norm that the backbone cannot have.
    """
    row = find_backbone(model)
    if shape and row.from_shape is None:
        channels, image_size = _as_image(shape, model.backbone)
    if channels not in (1, 3):
        raise UserError(f"model: images have 1 or 3 channels, not {channels}")
    _check_maps(model, row, task)
    with torch.random.fork_rng(devices=[]):
        # Only the generator of the CPU is seeded, so that those of CUDA do not change.
        torch.default_generator.manual_seed(stream_seed(seed, "init"))
        net = _bare_net(row, model.bottleneck, classes, shape or (channels, image_size, image_size), task)
        backbone = net.backbone
        state = initial_state(model, row, backbone, image_size)
        if state is not None:
            _load(row, backbone, state, image_size, model.weights)
        fixed = _read_classes(net, model, row, names)
        if row.finish is not None:
            row.finish(backbone)
        frozen = frozen_tensors(net, model.train) + fixed
        if norm is not None:
            _apply_norm(net, norm, model.backbone)
        net.frozen = names_of(net, frozen)
    return net.to(memory_format=torch.channels_last) if row.channels_last else net


def _as_image(shape: tuple[int, ...], backbone: str) -> tuple[int, int]:
    """(channels, side) of tensors that have the shape of square images; UserError for others."""
    if len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]:
        return shape[0], shape[1]
    raise UserError(f"model.backbone: {backbone} takes square images, and an example has the shape {list(shape)}; use "
                    f"{', '.join(KINDS)}, or a backbone of your own with from_shape")  # fmt: skip


def _bare_net(row: Backbone, bottleneck: int, classes: int, shape: tuple[int, ...], task: TaskRules) -> Net:
    """The backbone with random weights, in a network of its layout."""
    channels, image_size = shape[0], shape[-1]
    backbone = row.make(image_size, channels) if row.from_shape is None else row.from_shape(shape)
    layout = row.layout if isinstance(row.layout, Layout) else row.layout(backbone, image_size)
    net = Net(
        backbone, layout.feature_dim, classes, bottleneck=bottleneck,
        levels=tuple(f"backbone.{path}" for path in layout.levels), level_margin=layout.level_margin,
        stages={number: tuple(f"backbone.{path}" for path in paths) for number, paths in layout.stages.items()},
        grayscale=channels == 1 and not row.own_channels, task=task,
    )  # fmt: skip
    if row.head is not None:
        head, net.side = row.head(backbone), image_size
        net.head = net.head if bottleneck else _own_head(head, classes)
    return net


def _own_head(head: nn.Module, classes: int) -> nn.Module:
    """The head that came with a module; UserError where it has another number of outputs."""
    if isinstance(head, nn.Linear) and head.out_features == classes:
        return head
    outputs = head.out_features if isinstance(head, nn.Linear) else "other"
    raise UserError(f"model: its last Linear gives {outputs} outputs, and there are {classes} classes")


def _load(row: Backbone, backbone: nn.Module, state: StateDict, image_size: int, weights: str) -> None:
    """Loads a state into the backbone, or into the part of it to which weights belong.

    A file of fedsim's own network that has this part is loaded into the whole backbone.
    """
    prefixed = any(name.startswith(f"backbone.{row.inner}.") for name in state)
    inner = backbone if prefixed else backbone.get_submodule(row.inner)
    load_backbone(inner, _fit_position_embedding(inner, state, image_size), row.classifier, repr(weights))


def _read_classes(net: Net, model: ModelSettings, row: Backbone, names: Sequence[str]) -> list[Tensor]:
    """Gives the network the head that `model.head` names. Returns its fixed tensors, which are not trained or sent."""
    if model.head == "linear":
        return []
    if row.text is None:
        raise UserError(f"model.head = 'text' needs a backbone with a text encoder, {model.backbone} has none; "
                        "use open_clip:NAME, or tiny-clip for a try")  # fmt: skip
    if model.bottleneck:
        raise UserError("model.head = 'text' compares the backbone's features with texts; set model.bottleneck to 0")
    net.head = row.text(net.backbone, names, model.prompt)
    return list(net.head.buffers())


def _check_maps(model: ModelSettings, row: Backbone, task: TaskRules) -> None:
    """A segmentation needs features of every pixel, and a classification one vector per image."""
    if task.maps and not row.maps:
        maps = ", ".join(name for name, other in BACKBONES.items() if other.maps)
        raise UserError(f"model.backbone: {model.backbone} gives one vector per image, and this data set's task is "
                        f"segmentation; use {maps}")  # fmt: skip
    if row.maps and not task.maps:
        raise UserError(f"model.backbone: {model.backbone} gives features of every pixel, for data sets with masks; "
                        "use a classifier such as digits-cnn-bn or resnet18")  # fmt: skip
    if row.maps and model.bottleneck:
        raise UserError("model.bottleneck is for one vector per image; a segmentation has none: set it to 0")


def _apply_norm(net: Net, norm: Norm, backbone: str) -> None:
    """Lets a norm part change the layers; UserError for one that needs batch norm where there is none."""
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in net.backbone.modules())
    if Fact.PLAIN_LAYERS in norm.breaks and not has_batch_norm:
        raise UserError(f"norm {type(norm).__name__} needs a backbone with batch norm, {backbone} has none; "
                        "use digits-cnn-bn, a ResNet, an EfficientNet or densenet121")  # fmt: skip
    norm.apply(net)


NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def frozen_tensors(net: Net, train: str) -> list[nn.Parameter | Tensor]:
    """The parameters and buffers of `net` that are not trained; `train` joins words by `+`.

        all    every tensor
        head   the bottleneck and the head (linear probing)
        norm   the backbone's normalization layers

    Any other word is a pattern of parameter names with `*` and `?`, for example `backbone.layer4.*`. The buffers of a
    layer (running statistics, counters) are trained when one of its own parameters is, otherwise they are frozen too.

    A normalization layer that is not torch's is known by the word Norm in the name of its class or of a base of it.

    Raises UserError for a pattern that no parameter matches, and for `norm` where the backbone has no such layers.
    """
    if "all" in train.split("+"):
        return []
    trained = {id(parameter) for word in train.split("+") for parameter in _chosen(net, word)}
    frozen: list[nn.Parameter | Tensor] = []
    for module in net.modules():
        parameters = list(module.parameters(recurse=False))
        frozen += [parameter for parameter in parameters if id(parameter) not in trained]
        if not any(id(parameter) in trained for parameter in parameters):
            frozen += module.buffers(recurse=False)
    return frozen


def _chosen(net: Net, word: str) -> Iterator[nn.Parameter]:
    if word == "head":
        yield from net.bottleneck.parameters()
        yield from net.head.parameters()
        return
    if word == "norm":
        layers = [module for module in net.backbone.modules() if _normalizes(module)]
        chosen = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
        if not chosen:
            raise UserError("model.train: the backbone has no normalization layers with parameters, so that 'norm' "
                            "would train nothing; use head, all, or a pattern of names")  # fmt: skip
        yield from chosen
        return
    named = dict(net.named_parameters())
    matching = fnmatch.filter(named, word)
    if not matching:
        some = ", ".join([*list(named)[:2], list(named)[-1]])
        raise UserError(f"model.train: no parameter is called {word!r}; use all, head, norm, or a pattern of names "
                        f"such as {some}, joined by +")  # fmt: skip
    yield from (named[name] for name in matching)


def _normalizes(module: nn.Module) -> bool:
    """Whether a module is a normalization layer: one of torch, or one named so (timm's RmsNorm, EvoNorm, ...).

    A block that holds other layers with parameters (ConvNormAct) is none.
    """
    if isinstance(module, NORMS):
        return True
    named = any("norm" in kind.__name__.lower() for kind in type(module).__mro__)
    return named and not any(True for child in module.children() for _ in child.parameters())


def names_of(net: nn.Module, tensors: list[nn.Parameter | Tensor]) -> frozenset[str]:
    """The names of these tensors in the network's state, after norm parts have changed its layers.

    A layer that a part made keeps the tensors that it took over, and the tensors that it added are trained. Where it
    has copies of channels, they follow the layer from which they were copied; it is forgotten here. A layer that trains
    one of its own parameters also trains its buffers, because they depend on the input of the layer.
    """
    ids = {id(tensor) for tensor in tensors}
    names: set[str] = set()
    for path, module in net.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        parameters = dict(module.named_parameters(recurse=False))
        source = module.__dict__.get("took_over", module)
        still = {name for name in parameters if id(getattr(source, name)) in ids}
        buffers = {name for name, _ in module.named_buffers(recurse=False) if id(getattr(source, name)) in ids}
        names |= {prefix + name for name in (still | buffers if len(still) == len(parameters) else still)}
    for module in net.modules():
        module.__dict__.pop("took_over", None)
    return frozenset(names & net.state_dict().keys())
