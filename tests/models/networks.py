"""Networks for the model tests: with PACS's 7 classes, and either with values or with names and shapes alone."""

import copy
import functools

import torch
from safetensors.torch import save_file

from fedsim.models import Net, build_model
from fedsim.settings import ModelSettings


def make(backbone: str, norm=None, insert=None, *, size=32, channels=3, seed=0, **settings) -> Net:
    net = build_model(ModelSettings(backbone=backbone, **settings), 7, channels, size, norm, seed)
    if insert is not None:
        insert.apply(net)
    return net


_made = functools.lru_cache(maxsize=8)(make)


def build(*given, **settings) -> Net:
    """A network; what was made before is copied, which is faster than to draw its weights again."""
    new = {"options", "weights"} & settings.keys()
    return make(*given, **settings) if new else copy.deepcopy(_made(*given, **settings))


def outline(*given, **settings) -> Net:
    """A network without values: its names and shapes; of a batch without values it gives shapes of maps."""
    with torch.device("meta"):
        return make(*given, **settings)


def shapes(net: Net, *batch: int) -> list[tuple]:
    """The shapes of the levels of a network for such a batch, then those of its features and logits."""
    found = []
    for path in net.levels:
        net.get_submodule(path).register_forward_hook(lambda _module, _inputs, y: found.append(tuple(y.shape[1:])))
    with torch.no_grad():
        features = net.eval().features(torch.rand(batch, device=next(net.parameters()).device))
        return [*found, tuple(features.shape), tuple(net.head(features).shape)]


def saved(file, state) -> str:
    save_file({name: value.contiguous() for name, value in state.items()}, file)
    return str(file)
