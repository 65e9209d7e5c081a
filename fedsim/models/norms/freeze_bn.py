"""Batch norm whose statistics stay those with which training begins, as in fine-tuning of pretrained networks."""

from dataclasses import dataclass
from typing import Self

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.models.net import Net
from fedsim.models.norms.base import Norm


class AlwaysEval(_BatchNorm):
    """Mixed into a class of batch norm: the layer stays in eval mode, whatever mode its network is in."""

    def train(self, mode: bool = True) -> Self:
        """Stays in eval mode."""
        return super().train(False)


class FrozenBatchNorm1d(AlwaysEval, nn.BatchNorm1d):
    """Batch norm of vectors by statistics that do not change."""


class FrozenBatchNorm2d(AlwaysEval, nn.BatchNorm2d):
    """Batch norm of maps by statistics that do not change."""


FROZEN: dict[type[nn.Module], type[AlwaysEval]] = {nn.BatchNorm1d: FrozenBatchNorm1d, nn.BatchNorm2d: FrozenBatchNorm2d}


@dataclass(frozen=True)
class FreezeBn(Norm):
    """y = gamma (x - mu_0) / sqrt(var_0 + eps) + beta, where mu_0 and var_0 are those of the initial weights.

    Batches neither normalize nor change the statistics, in training as in evaluation. gamma and beta are trained.
    Without the part (`method.norm = "batch_norm"`) it is FedAvg.

    Source: DomainBed's ResNet, whose `freeze_bn` sets its layers to eval mode.
    """

    assumes = breaks = ()  # also for vectors

    @property
    def remark(self) -> str:
        """What becomes of it without pretrained weights."""
        return (
            "freeze_bn keeps the statistics of model.weights in every layer of batch norm; with model.weights = 'none' "
            "they are mean 0 and variance 1, so that no layer normalizes"
        )

    def apply(self, net: Net) -> None:
        """Makes the layers of batch norm keep their statistics; their tensors and names stay."""
        for layer in net.modules():
            if type(layer) in FROZEN:
                layer.__class__ = FROZEN[type(layer)]
                layer.eval()
