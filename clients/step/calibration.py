"""CSAC's client step: train alone once, then calibrate the fused model against that frozen local model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, Step, StepFunction
from clients.step.alignment import Projections, alignment_loss, attention, query_key_pairs
from clients.step.supervised import SupervisedStep
from clients.terms.label_smoothing import LabelSmoothing
from clients.tools.losses import mk_mmd
from clients.tools.networks import frozen_copy
from fedsim.models.layout import outputs_of
from fedsim.models.net import Net
from fedsim.parts.facts import Fact
from fedsim.settings import TrainSettings
from fedsim.settings.effect import Above, Only
from fedsim.settings.tuned import DECADE, Tuned

AlignFunction = Callable[[Batch, list[Tensor]], Tensor]
LEVELS = Only(weight=Above(0), align=("cross", "same_layer"))  # where feature levels are aligned
ACQUIRED = "acquired"  # the store's entry for the frozen local model L^h


@dataclass(frozen=True)
class SemanticCalibration(Step):
    """Stage A trains a local model once; stage C calibrates the fused model M against it in every round.

    Stage A (phase `acquire`) has label-smoothed CE on local data; its result L^h is frozen for the whole run. The loss
    of stage C is

        L = weight * sum_{l,m} alpha_{l,m} D(Proj_l(M_l(x)), Proj_m(L_m^h(x))) + CE(M(x), y)

    Source: CSAC (Yuan et al., TKDE 2023). alpha is the attention over the feature levels `net.levels`, and D the
    multi-kernel MMD. Projections are local, new in every round, and trained by the same loss. The released
    configuration computes `align="logits"` in place of the paper's alignment; here the paper's is the default. `weight
    = 0`, no acquisition and an averaging fusion give FedAvg.

    weight: lambda
    smoothing: rho of stage A (0 in the released code); next to FedSB both are added
    acquire_iterations, acquire_epochs: the local work of stage A: so many iterations (1,800), or so many full passes
    when iterations are 0. The local work of stage C is the experiment's
    align: cross (the paper), same_layer, logits (released code) or none
    attention: both, position, channel or uniform
    distance: mmd or mse
    statistic: of MMD: u, the unbiased estimate (the paper), or v, which is never negative (`losses.mk_mmd`)
    proj: conv, to 32 channels as in the released code, or pool1x1 (needs less time and memory). The paper projects to
    the size of the last level's features, 512 channels on ResNet-18: its first convolution alone has 32 million weights
    qk_conv: use the released code's query and key convolutions, which are never trained; one pair per level
    freeze_proj: do not train the projections
    cross_entropy: false drops the cross-entropy L_AR
    """

    weight: Annotated[
        float, Field(ge=0), Only(align=("cross", "same_layer", "logits")), Tuned("log:0.06:6", DECADE)
    ] = 0.6
    smoothing: Annotated[float, Field(ge=0, le=1)] = 0.1
    acquire_iterations: Annotated[int, Field(ge=0)] = 1800
    acquire_epochs: Annotated[int, Field(ge=0), Only(acquire_iterations=0)] = 30
    align: Literal["cross", "same_layer", "logits", "none"] = "cross"
    attention: Annotated[Literal["both", "position", "channel", "uniform"], LEVELS] = "both"
    distance: Annotated[Literal["mmd", "mse"], LEVELS] = "mmd"
    statistic: Annotated[
        Literal["u", "v"], Only(align="logits"), Only(align=("cross", "same_layer"), distance="mmd")
    ] = "u"
    proj: Annotated[Literal["conv", "pool1x1"], LEVELS] = "conv"
    qk_conv: Annotated[
        bool, Only(weight=Above(0), align=("cross", "same_layer"), attention=("both", "position", "channel"))
    ] = False
    freeze_proj: Annotated[bool, LEVELS] = False
    cross_entropy: Annotated[bool, Only(weight=Above(0), align=("cross", "same_layer", "logits"))] = True
    breaks = (Fact.OBJECTIVE,)
    prelude: ClassVar[str] = "acquire"
    needs_clients: ClassVar[bool] = True
    needs_levels: ClassVar[bool] = True

    @property
    def compiles(self) -> bool:
        """The feature maps are read by hooks, which a compiled pass does not have."""
        return self.weight == 0 or self.align in ("logits", "none")

    def work(self, round: LocalRound) -> TrainSettings:
        """Stage A has its own amount of work and a constant learning rate; otherwise the experiment's settings hold."""
        if round.phase != self.prelude:
            return round.train
        amount = {"iterations": self.acquire_iterations, "epochs": self.acquire_epochs}
        return round.train.model_copy(update={**amount, "schedule": "constant", "persist_optimizer": False})

    def lacks(self, round: LocalRound) -> bool:
        """A client that joins late and has no L^h runs stage A first."""
        return round.store.get(ACQUIRED) is None

    def begin(self, round: LocalRound) -> StepFunction:
        """The step function of the round's phase."""
        if round.phase == self.prelude:
            smoothing = LabelSmoothing(self.smoothing).begin(round)
            round.terms += [smoothing] if smoothing else []
            return SupervisedStep().begin(round)
        if self.weight == 0 or self.align == "none":
            return SupervisedStep().begin(round)
        return self._calibration(round)

    def end(self, round: LocalRound) -> None:
        """Stores the acquired model."""
        if round.phase == self.prelude:
            round.store.put(ACQUIRED, round.state_of())

    def _calibration(self, round: LocalRound) -> StepFunction:
        local = round.scratch[ACQUIRED] = frozen_copy(round.net, round.store.get(ACQUIRED))
        align = (self._logit_alignment if self.align == "logits" else self._level_alignment)(round, local)

        def loss_of(batch: Batch) -> Tensor:
            with outputs_of(round.net, round.net.levels) as levels:
                cross_entropy = round.forward(batch)
            loss = self.weight * align(batch, list(levels.values()))
            if self.cross_entropy:
                loss = loss + cross_entropy
            return round.with_terms(batch, loss)

        return lambda batch: round.move(lambda: loss_of(batch))

    def _logit_alignment(self, round: LocalRound, local: Net) -> AlignFunction:
        def align(batch: Batch, levels: list[Tensor]) -> Tensor:
            with torch.no_grad(), round.autocast():
                target = local(batch.images)
            return mk_mmd(batch.logits.float(), target.float(), statistic=self.statistic)

        return align

    def _level_alignment(self, round: LocalRound, local: Net) -> AlignFunction:
        shapes = _level_shapes(round, local)
        height, width = (max(size - round.net.level_margin, 1) for size in shapes[-1][1:])
        of_fused, of_local = (Projections(shapes, (height, width), self.proj).to(round.device) for _ in range(2))
        if self.freeze_proj:
            of_fused.requires_grad_(False), of_local.requires_grad_(False)
        else:
            round.optimizer.add_param_group({"params": [*of_fused.parameters(), *of_local.parameters()]})
        qk = query_key_pairs(len(shapes), round.device) if self.qk_conv else None
        position, channel = self.attention in ("both", "position"), self.attention in ("both", "channel")

        def align(batch: Batch, levels: list[Tensor]) -> Tensor:
            with round.autocast():
                with torch.no_grad(), outputs_of(local, local.levels) as own:
                    local.features(batch.images)
                fused, frozen = of_fused(levels), of_local(list(own.values()))
            alpha = attention(fused, frozen, qk, position, channel)
            pairs = "same_layer" if self.align == "same_layer" else "cross"
            return alignment_loss(fused, frozen, alpha, self.distance, pairs, self.statistic)

        return align


def _level_shapes(round: LocalRound, net: Net) -> list[tuple[int, int, int]]:
    """[C, H, W] of the feature maps of each level, of one training image."""
    first = round.data.training_positions()[:1]
    with torch.no_grad(), outputs_of(net, net.levels) as levels:
        net(next(round.data.evaluation(first, 1))[0])
    return [(level.shape[1], level.shape[2], level.shape[3]) for level in levels.values()]
