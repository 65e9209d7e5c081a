"""Norm parts: frozen dataclasses whose `apply(net)` replaces a net's normalization layers in place."""

from fedsim.models.norms.batch_norm import BatchNorm
from fedsim.models.norms.bin import BIN
from fedsim.models.norms.dson import DSON
from fedsim.models.norms.freeze_bn import FreezeBn
from fedsim.models.norms.ibn import IBN
from fedsim.models.norms.mixig import MixIG
from fedsim.models.norms.xan import XAN

__all__ = ["BIN", "DSON", "IBN", "XAN", "BatchNorm", "FreezeBn", "MixIG"]
