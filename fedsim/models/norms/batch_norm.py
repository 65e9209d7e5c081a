"""The standard norm part: the backbone keeps the layers that it has."""

from dataclasses import dataclass

from fedsim.models.net import Net
from fedsim.models.norms.base import Norm


@dataclass(frozen=True)
class BatchNorm(Norm):
    """The backbone's own batch norm, without any replacement (FedAvg)."""

    assumes = breaks = ()  # it fits every backbone, also one without norm layers

    def apply(self, net: Net) -> None:
        """Leave `net` as it is."""
