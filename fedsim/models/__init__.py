"""Backbones as features + head, and the normalization layers that methods put into them."""

from fedsim.models.backbones import find_backbone, weight_statistics
from fedsim.models.build import build_model
from fedsim.models.net import Net

__all__ = ["Net", "build_model", "find_backbone", "weight_statistics"]
