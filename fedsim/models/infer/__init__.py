"""Inference rules: how a model predicts on an unseen domain. Each file has one idea."""

from fedsim.models.infer.alpha import FixedAlpha, RandomAlpha, ZeroShotAdapter
from fedsim.models.infer.base import EvalMode, Infer, Predict
from fedsim.models.infer.ensemble import EnsembleOfHeads, EnsembleOfLocalBN
from fedsim.models.infer.iabn import IABN
from fedsim.models.infer.mixnorm import MixNorm
from fedsim.models.infer.recompute import Recompute
from fedsim.models.infer.sampled import SampledRepresentation
from fedsim.models.infer.tsmobn import TsmoBN

__all__ = [
    "IABN",
    "EnsembleOfHeads",
    "EnsembleOfLocalBN",
    "EvalMode",
    "FixedAlpha",
    "Infer",
    "MixNorm",
    "Predict",
    "RandomAlpha",
    "Recompute",
    "SampledRepresentation",
    "TsmoBN",
    "ZeroShotAdapter",
]
