"""I-BN: instance norm in the shallow layers, batch norm in the rest (IBN-Net, Pan et al., ECCV 2018)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models.cnns import DigitsCNN
from fedsim.models.net import Net
from fedsim.models.norms.base import Norm
from fedsim.models.norms.instance_norm import InstanceNorm2d
from fedsim.models.norms.placement import batch_norm_paths, copied_from, replace, within
from fedsim.parts.facts import Fact


def _instance_norm_like(bn: nn.BatchNorm2d, channels: slice = slice(None)) -> InstanceNorm2d:
    """An instance norm with the affine parameters of the chosen channels of a batch norm."""
    inorm = InstanceNorm2d(len(bn.weight[channels]), bn.eps).to(bn.weight.device)
    inorm.load_state_dict({"weight": bn.weight[channels], "bias": bn.bias[channels]})
    return copied_from(bn, inorm)


def _batch_norm_like(bn: nn.BatchNorm2d, channels: slice) -> nn.BatchNorm2d:
    """A batch norm with the affine parameters and statistics of the chosen channels of another."""
    part = nn.BatchNorm2d(len(bn.weight[channels]), bn.eps, bn.momentum).to(bn.weight.device)
    part.load_state_dict({name: value[channels] if value.dim() else value for name, value in bn.state_dict().items()})
    return copied_from(bn, part)


class IBNLayer(nn.Module):
    """Channels are split in two: y = [IN(x_1), BN(x_2)], or BN first when `instance_first` is off (DenseNet).

    Both parts start from the replaced layer: each takes its channels of the affine parameters, and the BN part also
    takes the statistics. The official ImageNet weights of IBN-Net are not needed. Plain BN: instance_channels = 0.
    """

    def __init__(self, bn: nn.BatchNorm2d, instance_channels: int, instance_first: bool = True) -> None:
        super().__init__()
        total = bn.num_features
        first = instance_channels if instance_first else total - instance_channels
        self.instance_first, self.sizes = instance_first, (first, total - first)
        front, back = slice(first), slice(first, total)
        at_instance, at_batch = (front, back) if instance_first else (back, front)
        self.inorm = _instance_norm_like(bn, at_instance)
        self.bn = _batch_norm_like(bn, at_batch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> the same shape."""
        layers = (self.inorm, self.bn) if self.instance_first else (self.bn, self.inorm)
        return torch.cat([layer(part.contiguous()) for layer, part in zip(layers, x.split(self.sizes, dim=1))], dim=1)


class ResidualIBNBlock(nn.Module):
    """A ResNet block with an instance norm after the residual sum, before the last ReLU (IBN-b)."""

    relu: nn.Module

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, child in block.named_children():  # the same names, so that state entries keep their names
            self.add_module(name, child)
        convolutions = [name for name in ("1", "2", "3") if hasattr(self, "conv" + name)]
        self.units = [(f"conv{name}", f"bn{name}") for name in convolutions]
        last = getattr(self, self.units[-1][1])
        self.inorm = InstanceNorm2d(last.num_features, last.eps).to(last.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to [B, C', H', W'], as the block that it replaces."""
        shortcut = getattr(self, "downsample", None)
        identity = x if shortcut is None else shortcut(x)
        for index, (conv, norm) in enumerate(self.units):
            x = getattr(self, norm)(getattr(self, conv)(x))
            if index < len(self.units) - 1:
                x = self.relu(x)
        return self.relu(self.inorm(x + identity))


def _normalize_before_last_activation(block: nn.Module) -> None:
    """IBN-b in a block of timm's ResNets, where the activation after the residual sum is a module of its own."""
    number = "3" if hasattr(block, "bn3") else "2"
    last = getattr(block, "bn" + number)
    inorm = InstanceNorm2d(last.num_features, last.eps).to(last.weight.device)
    setattr(block, "act" + number, nn.Sequential(inorm, getattr(block, "act" + number)))


@dataclass(frozen=True)
class IBN(Norm):
    """Instance norm in shallow layers, batch norm in the others.

    Source: IBN-Net (Pan et al., ECCV 2018), its blocks IBN-a and IBN-b. `norm = "batch_norm"` gives FedAvg's network.

    variant: "a" splits the first norm of every block of stages 1-3. On a ResNet half of the channels are IN, then BN.
    On DenseNet it is norm1 of the layers 0, 3, 6, ... of dense blocks 1-3, with BN first and 40 % IN last. On
    digits-cnn-bn it is the first norm only. The paper has no other families (EfficientNet, RegNet, ...); they are
    treated like ResNet. "b" makes the stem's norm IN, and adds an IN after the residual sum of the last block of stages
    1 and 2. It is for ResNets; on digits-cnn-bn the first norm becomes IN, and for other families it is not defined
    """

    variant: Literal["a", "b"] = "a"

    breaks = (Fact.PLAIN_LAYERS,)

    def apply(self, net: Net) -> None:
        """Replaces the layers in place. Raises UserError where the variant is not defined."""
        if hasattr(net.backbone, "layer1"):
            self._apply_resnet(net)
        elif hasattr(net.backbone, "features") and hasattr(net.backbone.features, "denseblock1"):
            self._apply_densenet(net)
        elif not isinstance(net.backbone, DigitsCNN):
            self._apply_blocks(net)
        elif self.variant == "a":
            replace(net, ["backbone.norm1"], lambda bn: IBNLayer(bn, bn.num_features // 2))
        else:
            replace(net, ["backbone.norm1"], _instance_norm_like)

    def _apply_blocks(self, net: Net) -> None:
        if self.variant == "b":
            raise UserError("norm IBN: variant 'b' is defined for ResNets only; use variant 'a' with this backbone")
        first: dict[str, str] = {}
        for path in batch_norm_paths(net, (1, 2, 3), stem=False):
            stage = max((prefix for paths in net.stages.values() for prefix in paths if within(path, prefix)), key=len)
            block = path.removeprefix(stage).split(".")[:2]  # the stage's child that holds the layer
            first.setdefault(".".join([stage, *block]), path)
        replace(net, list(first.values()), lambda bn: IBNLayer(bn, bn.num_features // 2))

    def _apply_resnet(self, net: Net) -> None:
        if self.variant == "a":
            stages = [f"backbone.layer{number}" for number in (1, 2, 3)]
            blocks = [f"{stage}.{name}" for stage in stages for name, _ in net.get_submodule(stage).named_children()]
            paths = [f"{block}.bn1" for block in blocks]
            replace(net, paths, lambda bn: IBNLayer(bn, bn.num_features // 2))
            return
        replace(net, ["backbone.bn1"], _instance_norm_like)
        for path in ("backbone.layer1", "backbone.layer2"):
            stage = net.get_submodule(path)
            assert isinstance(stage, nn.Sequential)
            if hasattr(stage[-1], "relu"):  # torchvision's block uses one ReLU module several times
                stage[-1] = ResidualIBNBlock(stage[-1])
            else:
                _normalize_before_last_activation(stage[-1])

    def _apply_densenet(self, net: Net) -> None:
        if self.variant == "b":
            raise UserError("norm IBN: variant 'b' is defined for ResNets only; use variant 'a' with densenet121")
        for number in (1, 2, 3):
            path = f"backbone.features.denseblock{number}"
            layers = list(net.get_submodule(path).named_children())[::3]
            paths = [f"{path}.{name}.norm1" for name, _ in layers]
            replace(net, paths, lambda bn: IBNLayer(bn, bn.num_features - int(0.6 * bn.num_features), False))
