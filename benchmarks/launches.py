"""How many operations one training step starts on a GPU, counted with or without one.

    python benchmarks/gpu.py --small --device cpu --checks launches --methods fedavg,gperxan,fedig,fedig-a \
        --backbones resnet18 --output /tmp/launches.md

An operation of PyTorch on tensors of the device counts as one launch, unless it is a view or only reserves memory. A
few operations consist of several kernels, so that the numbers are a close lower bound. On a CPU the device is imitated
(`fedsim.testing.other_device`), so that the code takes the way that it takes on a GPU.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from gpu_scale import Scale
from gpu_tables import Row
from steps import experiment_of, timed_step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsim.models.norms.bin import BINLayer
from fedsim.models.norms.dson import DSONLayer
from fedsim.models.norms.mixig import MixIG, MixIGLayer, switched
from fedsim.models.norms.xan import XANLayer
from fedsim.testing.other_device import OTHER, other_device

NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_local_scalar_dense", "aten::as_strided_")
FUSED = ("aten::_fused_", "aten::_foreach_")
SIZE, BATCH = 64, 2  # with images of 64 pixels no map of a ResNet has a single position


class Launches(TorchDispatchMode):
    """Counts the operations on tensors of a kind of device by the part of the step: forward, backward, optimizer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.parts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        on_device = any(tensor.device.type == self.kind for tensor in tensors)
        if on_device and not func.is_view and not name.startswith(NO_KERNEL):
            self.names[name] += 1
            self.parts[part_of(name)] += 1
        return result

    def row(self) -> Row:
        """The counts as the columns of a table."""
        parts = {part: self.parts[part] for part in ("forward", "backward", "optimizer")}
        return {**parts, "launches": self.parts.total()}


def part_of(name: str) -> str:
    """The part of a step in which an operation takes place now."""
    if torch._C._current_autograd_node() is not None:
        return "backward"
    return "optimizer" if name.startswith(FUSED) else "forward"


def counted(work: Callable[[], Any], device: torch.device) -> Launches:
    """The launches of `work` on the device."""
    with Launches(device.type) as launches:
        work()
    return launches


def norm_layers() -> dict[str, Callable[[], nn.Module]]:
    """A norm layer of each kind with four channels; a MixIG layer has global statistics and draws."""
    return {
        "BatchNorm2d": lambda: nn.BatchNorm2d(4),
        "XAN": lambda: XANLayer(nn.BatchNorm2d(4)),
        "DSON": lambda: DSONLayer(nn.BatchNorm2d(4)),
        "BIN": lambda: BINLayer(nn.BatchNorm2d(4)),
        "MixIG, mixed": mixig_layer,
        "MixIG, adapted": mixig_layer,
    }


def mixig_layer() -> MixIGLayer:
    """A MixIG layer that has got global statistics."""
    layer = MixIGLayer(nn.BatchNorm2d(4), MixIG(adapter=True))
    layer.fresh = False
    return layer


def layer_launches(name: str, device: torch.device) -> Launches:
    """The launches of one norm layer in training, forward and backward."""
    layer = norm_layers()[name]().to(device)
    images = torch.rand(BATCH, 4, 8, 8).to(device).contiguous(memory_format=torch.channels_last).requires_grad_()
    _, _, mode = name.partition(", ")
    if isinstance(layer, MixIGLayer):
        layer.u, layer.z = torch.rand(4).to(device), torch.rand(BATCH).to(device)
        if layer.adapter is not None:
            layer.adapter.requires_grad_(mode == "adapted")
    gradient = torch.rand(BATCH, 4, 8, 8).to(device).contiguous(memory_format=torch.channels_last)

    def work() -> None:
        with switched({"": layer}, mode) if mode else nullcontext():
            layer(images).backward(gradient)

    work()  # the first gradients are stored as they are, which later ones are not
    layer.zero_grad(set_to_none=True)
    images.grad = None
    return counted(work, device)


def launches(scale: Scale, device: torch.device) -> Iterator[Row]:
    """Operations started in one training step of every row, and forward and backward in one layer of normalization.

    On a CPU they are those of the imitated device. `ratio` is to the first row; a layer has no optimizer.
    """
    real = device.type == "cuda"
    with nullcontext() if real else other_device():
        where = device if real else OTHER
        for backbone in scale.backbones:
            first = 0
            for method in scale.methods:
                take = timed_step(experiment_of(method, options(backbone)), where)
                take()
                counts = counted(take, where)
                total = counts.parts.total()
                first = first or total
                yield {"of": f"{method}, {backbone}", **counts.row(), "ratio": total / first}
        for name in norm_layers():
            yield {"of": f"a layer: {name}", **layer_launches(name, where).row()}


def options(backbone: str) -> Namespace:
    """The settings of a step in the form that `steps.py` takes."""
    return Namespace(data="digits", backbone=backbone, size=SIZE, batch=BATCH, bottleneck=0, head="linear", train="all")
