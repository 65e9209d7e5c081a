"""Which tensors of a network are trained: `model.train`. All others are frozen and are not sent."""

import fnmatch
from collections.abc import Iterator

from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.net import Net

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
