"""Residual adapters in a frozen backbone (PerAda)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net
from fedsim.parts.facts import Fact


class MapDropout(nn.Module):
    """Dropout of maps: each number is 0 with probability p, else divided by 1 - p; the identity in eval mode.

    On a CPU it draws 16 bits per number. PyTorch's dropout takes four times as long, a fifth of an adapter network's
    step. p is met to 2^-16. Draws come from torch's generator, which is seeded per client and round.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        if not self.training or not self.p:
            return x
        dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
        if x.device.type != "cpu" or not dense or torch.compiler.is_compiling():  # the compiler has no such draws
            return F.dropout(x, self.p)
        count = x.numel()
        bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
        mask = (bits >= round((self.p - 0.5) * 2**16)).to(x.dtype).mul_(1 / (1 - self.p))
        return x * mask.as_strided(x.shape, x.stride())


class Adapter(nn.Module):
    """A(x) = x + Conv(Dropout(BN(x))), a 1x1 convolution, from [B, C, H, W] to the same shape.

    The convolution has no bias and starts at N(0, std^2). With weights of zero A is the identity.
    """

    def __init__(self, channels: int, dropout: float, std: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = MapDropout(dropout)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.normal_(self.conv.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """The map plus the output of the adapter's convolution."""
        return x + self.conv(self.dropout(self.norm(x)))

    def after(self, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        """A forward hook. It is a bound method, so that a copy of the network calls its own copy of the adapter."""
        return self(output)


@dataclass(frozen=True)
class Adapters(Insert):
    """Adapters in the blocks of a frozen backbone: PerAda's network (Xie et al., CVPR 2024).

    A residual block of two convolutions (ResNet-18) gets two: between conv1 and bn1, and between conv2 and bn2. Any
    other module that contains batch norm itself (a bottleneck block, the digits CNN) gets one after its last batch
    norm. These tensors are trained and exchanged: the adapters, the batch norm of these modules (and of the stem), a
    bottleneck and the head. All others, with the batch norm of shortcuts, have the place `frozen`: they keep their
    weights and statistics in training too, and are not sent. A frozen backbone is useful only with pretrained weights
    (`model.weights`). ResNet-18 trains 1,400,320 parameters in adapters and 7,808 in batch norm; its head has 513 per
    class. Every norm part other than batch norm is refused.

    dropout: p inside the adapters
    std: the standard deviation of the initial weights
    freeze: false trains and exchanges the whole network, which is necessary without pretrained weights. Then `inserts =
    "none"` gives FedAvg's network
    """

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    std: Annotated[float, Field(ge=0)] = 1e-4
    freeze: bool = True
    order: ClassVar[int] = 0
    assumes = (Fact.PLAIN_LAYERS,)

    def apply(self, net: Net) -> None:
        """Adds the adapters and declares what is frozen. UserError for a backbone without batch norm in blocks."""
        places = [place for block in blocks(net.backbone) for place in adapter_places(block)]
        if not places:
            raise UserError("insert Adapters: the backbone has no blocks with batch norm; use a ResNet, densenet121 or "
                            "digits-cnn-bn")  # fmt: skip
        adapters = [Adapter(norm.num_features, self.dropout, self.std) for _, norm in places]
        net.adapters = nn.ModuleList(adapters)
        for adapter, (module, _) in zip(adapters, places, strict=True):
            module.register_forward_hook(adapter.after)
        if self.freeze:
            net.frozen |= net.state_dict().keys() - trained_names(net)


def blocks(backbone: nn.Module) -> Iterator[nn.Module]:
    """Modules that contain batch norm themselves.

    A plain Sequential, such as a ResNet's shortcut, does not count. The backbone itself counts only where it has no
    blocks; otherwise its own batch norm is that of the stem.
    """
    blocks = [module for module in backbone.modules() if type(module) is not nn.Sequential and own_norms(module)]
    yield from [module for module in blocks if module is not backbone] or blocks


def own_norms(module: nn.Module) -> list[nn.BatchNorm2d]:
    """The batch norm that the module contains itself, in order."""
    return [child for child in module.children() if isinstance(child, nn.BatchNorm2d)]


def adapter_places(block: nn.Module) -> list[tuple[nn.Module, nn.BatchNorm2d]]:
    """The modules of a block after which an adapter comes, each with a batch norm as wide as its output."""
    norms = own_norms(block)
    if len(norms) == 2 and all(hasattr(block, name) for name in ("conv1", "bn1", "conv2", "bn2")):
        pairs = [(block.get_submodule(f"conv{number}"), block.get_submodule(f"bn{number}")) for number in (1, 2)]
        return [(conv, norm) for conv, norm in pairs if isinstance(norm, nn.BatchNorm2d)]
    return [(norms[-1], norms[-1])]


def trained_names(net: Net) -> set[str]:
    """The state entries of adapters, of the batch norm of blocks and stem, of bottleneck and head."""
    chosen = {id(norm) for block in (*blocks(net.backbone), net.backbone) for norm in own_norms(block)}
    parts = (net.get_submodule("adapters"), net.bottleneck, net.head)
    trained = {id(module) for part in parts for module in part.modules()} | chosen
    return {
        f"{path}.{name}"
        for path, module in net.named_modules()
        if id(module) in trained
        for name in (*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False)))
    }
