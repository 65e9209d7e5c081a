"""The standard norm part: the backbone keeps the layers that it has."""

from dataclasses import dataclass
from typing import ClassVar

from fedsim.models.net import Net
from fedsim.models.norms.base import Norm


@dataclass(frozen=True)
class BatchNorm(Norm):
    """The backbone's own batch norm, without any replacement (FedAvg)."""

    needs_batch_norm: ClassVar[bool] = False  # it fits every backbone, also one without norm layers
    breaks = ()

    def apply(self, net: Net) -> None:
        """Leave `net` as it is."""
