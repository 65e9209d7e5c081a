"""The catalog of backbones: one row each (`fedsim.models.layout.Backbone`)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from fedsim.common.errors import UserError
from fedsim.models.clip_family import clip_row
from fedsim.models.cnns import SMALLEST_IMAGE, DigitsCNN, EncodedUNet, SmallCNN, UNet
from fedsim.models.layout import Backbone, Layout, Statistics
from fedsim.models.own_module import GIVEN, module_row
from fedsim.models.tensor_backbones import KINDS, tensor_row
from fedsim.models.timm_family import timm_row
from fedsim.models.tiny_clip import FEATURES, TinyClip
from fedsim.models.weights import download_imagenet
from fedsim.settings import ModelSettings
from fedsim.settings.plugins import instance, lookup, makes

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
ALEXNET_POOLS_FROM = 63  # below, the third pooling of AlexNet would make an empty map
DENSENET_POOLS_FROM = 32  # below, the last transition of DenseNet would


def _resnet(name: str, image_size: int, channels: int) -> nn.Module:
    import torchvision  # slow to import, and not needed for the digits CNN

    model = getattr(torchvision.models, name)(weights=None)
    model.fc = nn.Identity()
    return model


def _densenet121(image_size: int, channels: int) -> nn.Module:
    import torchvision

    model = torchvision.models.densenet121(weights=None)
    model.classifier = nn.Identity()
    if image_size < DENSENET_POOLS_FROM:
        for number in (1, 2, 3):  # the same averages, but the odd last row and column are kept
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


def _vit(name: str, patch: int, image_size: int, channels: int) -> nn.Module:
    if image_size % patch:
        fitting = max(patch, round(image_size / patch) * patch)
        raise UserError(f"model.backbone: {name} cuts images into patches of {patch} px, which do not fit "
                        f"data.image_size = {image_size}; use {fitting}")  # fmt: skip
    import torchvision

    model = getattr(torchvision.models, name.replace("-", "_"))(weights=None, image_size=image_size)
    model.heads = nn.Identity()
    return model


def _digits(batch_norm: bool, image_size: int, channels: int) -> nn.Module:
    if image_size < SMALLEST_IMAGE:
        raise UserError(f"model.backbone: the digits CNN needs images of at least {SMALLEST_IMAGE} px; "
                        f"data.image_size is {image_size}")  # fmt: skip
    return DigitsCNN(channels, batch_norm)


def _small_cnn(image_size: int, channels: int) -> nn.Module:
    return SmallCNN(channels)


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
    return _torchvision_row(partial(_resnet, name), layout, "fc.", enum, entry)


def _vit_row(name: str, patch: int, enum: str) -> Backbone:
    return _torchvision_row(partial(_vit, name, patch), Layout(768), "heads.", enum, channels_last=False)


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


def _encoded_row(row: Backbone, paths: tuple[str, ...], channels: tuple[int, ...]) -> Backbone:
    """A U-Net around a network of torchvision, whose weights go into its encoder."""

    def make(image_size: int, image_channels: int) -> nn.Module:
        return EncodedUNet(row.make(image_size, image_channels), paths, channels)

    own = row.layout
    assert isinstance(own, Layout)
    stages = {number: tuple(f"encoder.{path}" for path in own.stages[number]) for number in own.stages}
    stages[max(stages)] += ("decoder",)
    layout = Layout(EncodedUNet.feature_dim, tuple(f"encoder.{path}" for path in own.levels), stages)
    return replace(row, make=make, layout=layout, maps=True, inner="encoder")


_DIGIT_LEVELS = ("pool1", "pool2")
_DENSE_STAGES = {
    **{number: (f"features.denseblock{number}", f"features.transition{number}") for number in (1, 2, 3)},
    4: ("features.denseblock4", "features.norm5"),
}
_DENSE_LEVELS = ("features.denseblock2", "features.denseblock3", "features.denseblock4")

BACKBONES: dict[str, Backbone] = {
    "digits-cnn": Backbone(
        partial(_digits, False), Layout(DigitsCNN.feature_dim, _DIGIT_LEVELS), "head.", own_channels=True,
    ),
    "digits-cnn-bn": Backbone(
        partial(_digits, True), Layout(DigitsCNN.feature_dim, _DIGIT_LEVELS, {1: ("norm1", "norm2")}), "head.",
        own_channels=True,
    ),
    "small-cnn": Backbone(
        _small_cnn, Layout(SmallCNN.feature_dim, ("block2", "block3", "block4"),
                           {number: (f"block{number}",) for number in (1, 2, 3, 4)}),
        "head.", own_channels=True, channels_last=True,
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
    "tiny-clip": Backbone(
        lambda image_size, channels: TinyClip(image_size), Layout(FEATURES), "(none)", text=TinyClip.text_head,
        finish=TinyClip.keep_images_only,
    ),
}  # fmt: skip
_RESNET_MAPS = ("relu", "layer1", "layer2", "layer3", "layer4")
_DENSENET_MAPS = ("features.relu0", *(f"features.denseblock{number}" for number in (1, 2, 3)), "features.norm5")
BACKBONES |= {
    "unet-resnet18": _encoded_row(BACKBONES["resnet18"], _RESNET_MAPS, (64, 64, 128, 256, 512)),
    "unet-resnet50": _encoded_row(BACKBONES["resnet50"], _RESNET_MAPS, (64, 256, 512, 1024, 2048)),
    "unet-densenet121": _encoded_row(BACKBONES["densenet121"], _DENSENET_MAPS, (64, 256, 512, 1024, 1024)),
}

# Rows that are built from a name, as in "timm:resnet18": prefix -> function (name, model.options) -> the row
FAMILIES: dict[str, Callable[[str, Mapping[str, Any]], Backbone]] = {
    "timm": timm_row,
    "open_clip": clip_row,
}


def find_backbone(model: ModelSettings) -> Backbone:
    """The row of `model.backbone` in the catalog, in an installed package or in a module (`module:name`).

    There it is a Backbone, a class that derives from nn.Module, or a function that is declared to return one of both.

    Raises UserError for an unknown backbone, or for options that it does not take.
    """
    if is_family(model.backbone):
        family, _, name = model.backbone.partition(":")
        return FAMILIES[family](name, model.options)
    if model.backbone in KINDS:
        return tensor_row(model.backbone, model.options)
    where = "model.backbone: unknown"
    if model.backbone in GIVEN:
        return GIVEN[model.backbone]
    names = {**BACKBONES, **dict.fromkeys(KINDS), **dict.fromkeys(f"{family}:NAME" for family in FAMILIES)}
    named = lookup(model.backbone, names, "backbones", where)
    if makes(named, nn.Module):
        named = module_row(named, model.backbone)
    row = instance(named, Backbone, f"{where} {model.backbone!r}: it")
    if model.options:
        raise UserError(f"model.options: {model.backbone} takes none; they are for {', '.join(FAMILIES)}:NAME, "
                        "mlp and cnn-1d")  # fmt: skip
    return row


def is_family(name: str) -> bool:
    """Whether a backbone is one of a family, as `timm:resnet18`, and not `module:name`."""
    family, colon, _ = name.partition(":")
    return bool(colon) and family in FAMILIES


def weight_statistics(model: ModelSettings) -> Statistics | None:
    """The mean and deviation with which the backbone's weights were trained; None where there are no such weights."""
    return find_backbone(model).statistics
