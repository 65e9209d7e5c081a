"""The catalog of backbones and `build_model`, which makes a net of settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fedsim.errors import UserError
from fedsim.models.digits_cnn import SMALLEST_IMAGE, DigitsCNN
from fedsim.models.layout import Layout, Statistics
from fedsim.models.net import Net
from fedsim.models.norms.base import Norm
from fedsim.models.tasks import CLASSIFIES, TaskRules
from fedsim.models.timm_family import fit_position_embedding, timm_row
from fedsim.models.training import frozen_tensors, names_of
from fedsim.models.unet import UNet
from fedsim.models.weights import StateDict, download_imagenet, load_backbone, read_weight_file
from fedsim.plugins import instance, lookup
from fedsim.seeding import stream_seed
from fedsim.settings import ModelSettings

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
WEIGHT_WORDS = ("imagenet", "hub", "package")  # what `model.weights` may say beside "none" and a file
ALEXNET_POOLS_FROM = 63  # below, the third pooling of AlexNet would make an empty map
DENSENET_POOLS_FROM = 32  # below, the last transition of DenseNet would


Source = Callable[[nn.Module, int], StateDict]  # (backbone, image_size) -> its weights


@dataclass(frozen=True)
class Backbone:
    """One row of the catalog.

    make: (image_size, channels) -> module whose forward gives pooled features
    layout: feature width and places, or a function (backbone, image_size) that finds them on the module
    classifier: prefixes of the original classifier's keys in weight files
    sources: where weights come from, by the word that `model.weights` names them with
    statistics: mean and deviation that the weights expect; None: images in [0, 1] as they are
    input_size: side in pixels of the images that the weights were trained on; 0: none
    licence: licence of the published weights; empty: not known
    own_channels: takes one-channel images itself
    channels_last: faster in this memory layout on CPUs too
    maps: the forward gives features of every pixel, [B, D, H, W], for segmentation
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


def _resnet(name: str) -> Callable[[int, int], nn.Module]:
    def make(image_size: int, channels: int) -> nn.Module:
        import torchvision  # slow to import, and the digits CNN needs none of it

        model = getattr(torchvision.models, name)(weights=None)
        model.fc = nn.Identity()
        return model

    return make


def _densenet121(image_size: int, channels: int) -> nn.Module:
    import torchvision

    model = torchvision.models.densenet121(weights=None)
    model.classifier = nn.Identity()
    if image_size < DENSENET_POOLS_FROM:
        for number in (1, 2, 3):  # the same averages, with the odd last row and column kept
            getattr(model.features, f"transition{number}").pool = nn.AvgPool2d(2, 2, ceil_mode=True)
    return model


def _alexnet(image_size: int, channels: int) -> nn.Module:
    import torchvision

    model = torchvision.models.alexnet(weights=None)
    model.classifier[6] = nn.Identity()
    if image_size < ALEXNET_POOLS_FROM:
        for index in (2, 5, 12):
            model.features[index] = nn.MaxPool2d(3, 2, padding=1)
    return model


def _vit(name: str, patch: int) -> Callable[[int, int], nn.Module]:
    def make(image_size: int, channels: int) -> nn.Module:
        if image_size % patch:
            fitting = max(patch, round(image_size / patch) * patch)
            raise UserError(f"model.backbone: {name} cuts images into patches of {patch} px, which do not fit "
                            f"data.image_size = {image_size}; use {fitting}")  # fmt: skip
        import torchvision

        model = getattr(torchvision.models, name.replace("-", "_"))(weights=None, image_size=image_size)
        model.heads = nn.Identity()
        return model

    return make


def _digits(batch_norm: bool) -> Callable[[int, int], nn.Module]:
    def make(image_size: int, channels: int) -> nn.Module:
        if image_size < SMALLEST_IMAGE:
            raise UserError(f"model.backbone: the digits CNN needs images of at least {SMALLEST_IMAGE} px; "
                            f"data.image_size is {image_size}")  # fmt: skip
        return DigitsCNN(channels, batch_norm)

    return make


def _torchvision_row(
    make: Callable[[int, int], nn.Module],
    layout: Layout,
    classifier: str,
    enum: str,
    entry: str = "IMAGENET1K_V1",
    channels_last: bool = True,
) -> Backbone:
    source = partial(download_imagenet, enum, entry)
    return Backbone(
        make,
        layout,
        classifier,
        sources={"imagenet": source, "hub": source},
        statistics=Statistics(IMAGENET_MEAN, IMAGENET_STD),
        input_size=224,
        licence="BSD-3-Clause",
        channels_last=channels_last,
    )


def _resnet_row(name: str, feature_dim: int, enum: str, entry: str) -> Backbone:
    stages = {number: (f"layer{number}",) for number in (1, 2, 3, 4)}
    layout = Layout(feature_dim, ("layer2", "layer3", "layer4"), stages)
    return _torchvision_row(_resnet(name), layout, "fc.", enum, entry)


def _vit_row(name: str, patch: int, enum: str) -> Backbone:
    return _torchvision_row(_vit(name, patch), Layout(768), "heads.", enum, channels_last=False)


def _unet_row(width: int, depth: int) -> Backbone:
    def make(image_size: int, channels: int) -> nn.Module:
        if image_size < 2**depth:
            raise UserError(f"model.backbone: a U-Net with {depth} halvings needs images of at least {2**depth} px; "
                            f"data.image_size is {image_size}")  # fmt: skip
        return UNet(channels, width, depth)

    stages = {1: ("encoder.0", "encoder.1"), **{number: (f"encoder.{number}",) for number in range(2, depth + 1)}}
    stages[4] = (*stages.get(4, ()), "decoder")
    levels = tuple(f"encoder.{number}" for number in range(depth - 2, depth + 1))
    return Backbone(make, Layout(2 * width, levels, stages), own_channels=True, channels_last=True, maps=True)


_DIGIT_LEVELS = ("pool1", "pool2")
_DENSE_STAGES = {
    **{number: (f"features.denseblock{number}", f"features.transition{number}") for number in (1, 2, 3)},
    4: ("features.denseblock4", "features.norm5"),
}
_DENSE_LEVELS = ("features.denseblock2", "features.denseblock3", "features.denseblock4")

BACKBONES: dict[str, Backbone] = {
    "digits-cnn": Backbone(
        _digits(False), Layout(DigitsCNN.feature_dim, _DIGIT_LEVELS), "head.", own_channels=True,
    ),
    "digits-cnn-bn": Backbone(
        _digits(True), Layout(DigitsCNN.feature_dim, _DIGIT_LEVELS, {1: ("norm1", "norm2")}), "head.",
        own_channels=True,
    ),
    "resnet18": _resnet_row("resnet18", 512, "ResNet18_Weights", "IMAGENET1K_V1"),
    "resnet50": _resnet_row("resnet50", 2048, "ResNet50_Weights", "IMAGENET1K_V2"),
    "densenet121": _torchvision_row(
        _densenet121, Layout(1024, _DENSE_LEVELS, _DENSE_STAGES), "classifier.", "DenseNet121_Weights"
    ),
    # CSAC's conv3, conv4 and conv5 are 384x13x13, 256x13x13 and, after the last pooling, 256x6x6; projected to 4x4
    "alexnet": _torchvision_row(
        _alexnet, Layout(4096, ("features.7", "features.9", "features.12"), level_margin=2), "classifier.6.",
        "AlexNet_Weights",
    ),
    "vit-b-16": _vit_row("vit-b-16", 16, "ViT_B_16_Weights"),
    "vit-b-32": _vit_row("vit-b-32", 32, "ViT_B_32_Weights"),
    "unet": _unet_row(16, 4),
    "unet-small": _unet_row(8, 3),  # for images of about 32 px
}  # fmt: skip

# Rows made of a name, as in "timm:resnet18": prefix -> function (name, model.options) -> the row
FAMILIES: dict[str, Callable[[str, Mapping[str, Any]], Backbone]] = {
    "timm": lambda name, options: Backbone(**timm_row(name, options)),
}


def find_backbone(model: ModelSettings) -> Backbone:
    """The row of `model.backbone` in the catalog, an installed package or a module (`module:name`).

    UserError for an unknown one, or for options that it does not take.
    """
    family, colon, name = model.backbone.partition(":")
    if colon and family in FAMILIES:
        return FAMILIES[family](name, model.options)
    where = "model.backbone: unknown"
    known = {**BACKBONES, **dict.fromkeys(f"{family}:NAME" for family in FAMILIES)}
    row = instance(lookup(model.backbone, known, "backbones", where), Backbone, f"{where} {model.backbone!r}: it")
    if model.options:
        raise UserError(f"model.options: {model.backbone} takes none; they are for {', '.join(FAMILIES)}:NAME")
    return row


def weight_statistics(model: ModelSettings) -> Statistics | None:
    """Mean and deviation with which the backbone's weights were trained; None where there are no such weights."""
    return find_backbone(model).statistics


def _initial_state(model: ModelSettings, row: Backbone, backbone: nn.Module, image_size: int) -> StateDict | None:
    if model.weights == "none":
        return None
    if model.weights in row.sources:
        return row.sources[model.weights](backbone, image_size)
    if model.weights in WEIGHT_WORDS:
        known = ", ".join(["none", *row.sources])
        raise UserError(f"model.weights: there are no ImageNet weights ({model.weights!r}) for {model.backbone}; "
                        f"use {known} or a local file")  # fmt: skip
    return read_weight_file(model.weights)


def _fit_position_embedding(backbone: nn.Module, state: StateDict, image_size: int) -> StateDict:
    """Interpolate ViT's position embedding when the file was made for another image size."""
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
) -> Net:
    """Net of the settings, the same for the same seed; torch's global generator is left as it was.

    Args:
        model: backbone, initial weights and bottleneck width
        classes: outputs of the head
        channels: 1 or 3; torchvision's backbones get one-channel images repeated to three
        image_size: side of the square images in pixels; ViT's must be a multiple of its patch
        norm: norm part with `apply(net)`; None leaves the backbone's batch norm
        seed: the run's seed, of which the stream "init" is used
        task: what makes the head, and says whether the backbone has to give maps

    Small images: ResNet keeps the papers' 7x7 stride-2 stem at every size; AlexNet's poolings are padded by one
    below 63 px and DenseNet's transitions keep odd borders below 32 px, where their maps would become empty.
    Raises UserError for an unknown backbone, weights that do not fit, or a norm that the backbone cannot carry.
    """
    row = find_backbone(model)
    if channels not in (1, 3):
        raise UserError(f"model: images have 1 or 3 channels, not {channels}")
    _check_maps(model, row, task)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(seed, "init"))  # the CPU's only: CUDA is not disturbed
        backbone = row.make(image_size, channels)
        layout = row.layout if isinstance(row.layout, Layout) else row.layout(backbone, image_size)
        net = Net(
            backbone, layout.feature_dim, classes, bottleneck=model.bottleneck,
            levels=tuple(f"backbone.{path}" for path in layout.levels), level_margin=layout.level_margin,
            stages={number: tuple(f"backbone.{path}" for path in paths) for number, paths in layout.stages.items()},
            grayscale=channels == 1 and not row.own_channels, task=task,
        )  # fmt: skip
        state = _initial_state(model, row, backbone, image_size)
        if state is not None:
            state = _fit_position_embedding(backbone, state, image_size)
            load_backbone(backbone, state, row.classifier, repr(model.weights))
        frozen = frozen_tensors(net, model.train)
        if norm is not None:
            _apply_norm(net, norm, model.backbone)
        net.frozen = names_of(net, frozen)
    return net.to(memory_format=torch.channels_last) if row.channels_last else net


def _check_maps(model: ModelSettings, row: Backbone, task: TaskRules) -> None:
    """A segmentation needs features of every pixel, a classification one vector per image."""
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
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in net.backbone.modules())
    if norm.needs_batch_norm and not has_batch_norm:
        raise UserError(f"norm {type(norm).__name__} needs a backbone with batch norm, {backbone} has none; "
                        "use digits-cnn-bn, a ResNet, an EfficientNet or densenet121")  # fmt: skip
    norm.apply(net)
