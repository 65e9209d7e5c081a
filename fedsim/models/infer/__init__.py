"""Inference rules: how a model predicts on an unseen domain. Each file has one idea, and `base.py` their contract."""

from fedsim.models.infer.base import EvalMode, Infer, Predict

__all__ = ["EvalMode", "Infer", "Predict"]
