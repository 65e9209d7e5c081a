"""The part of a recipe that the server uses."""

from dataclasses import dataclass

from fedsim.models.infer.base import EvalMode, Infer
from fedsim.parts.part import RecipeParts
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import Bank, Compress, Fuse, Refine, Share, Visit, Weights
from strategies.share.everything import Everything
from strategies.weights.by_examples import ByExamples


@dataclass(frozen=True)
class ServerRecipe(RecipeParts):
    """The slots of the server's parts, and the inference rule; every default is FedAvg's."""

    share: Share = Everything()
    compress: Compress | None = None
    weights: Weights = ByExamples()
    fuse: Fuse = WeightedMean()
    banks: tuple[Bank, ...] = ()
    refine: tuple[Refine, ...] = ()
    visits: tuple[Visit, ...] = ()
    infer: Infer = EvalMode()
