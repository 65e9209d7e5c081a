"""The rules of tasks whose predictions are scores or numbers: two classes, several labels, and regression."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.common.measures import area_under_roc, best_threshold
from fedsim.common.tasks import BINARY, MULTI_LABEL, REGRESSION
from fedsim.models.tasks import Classification, Examined, Labelled, Predict, TaskRules, mean_of_defined
from fedsim.settings import DataSettings, TrainSettings


@dataclass(frozen=True)
class Binary(Classification):
    """One of two classes per example. It is trained as a classification, and measured by the AUROC.

    The positive class is the second one, in the order of the data set's classes: `1` of 0 and 1, `yes` of no and yes.
    A validation also gives the threshold of its probability with the greatest sensitivity + specificity. Both are
    undefined (NaN) where all examples are of one class.
    """

    metric: ClassVar[str] = BINARY.metric
    blind: ClassVar[str] = "AUROC is not defined there"
    further: ClassVar[tuple[str, ...]] = BINARY.further

    @torch.inference_mode()
    def examine(self, predict: Predict, batches: Labelled) -> Examined:
        """The AUROC, the mean cross-entropy and the threshold of labelled batches."""
        kept, truth, loss = collected(self, predict, batches)
        if not len(truth):
            return Examined()
        scores, positive = kept[:, 1], truth == 1
        further = {"threshold": best_threshold(scores, positive)}
        return Examined(area_under_roc(scores, positive), loss, len(truth), further)


@dataclass(frozen=True)
class MultiLabel(TaskRules):
    """L labels per example, each of which it has or has not: a linear head, one sigmoid each, and BCE.

    The metric is the mean over labels of the AUROC of a label. A label that all examples have, or that none has, has no
    AUROC and is left out; without any other the mean is undefined (NaN).
    """

    metric: ClassVar[str] = MULTI_LABEL.metric

    def head(self, features: int, outputs: int) -> nn.Module:
        """[B, features] to [B, L]."""
        return nn.Linear(features, outputs)

    def loss(self, logits: Tensor, truth: Tensor) -> Tensor:
        """Mean binary cross-entropy of logits [B, L] and labels [B, L] of 0 and 1."""
        return F.binary_cross_entropy_with_logits(logits.float(), truth.float())

    def sums(self, logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """No sum gives a mean of AUROC (0), and the cross-entropy of each example, a mean over its labels."""
        losses = F.binary_cross_entropy_with_logits(logits, truth.float(), reduction="none")
        return torch.zeros(()), losses.mean(1).sum().double()

    def keep(self, logits: Tensor) -> Tensor:
        """Probabilities [B, L]."""
        return logits.float().sigmoid()

    def undefined(self, truth: Tensor, outputs: Sequence[str]) -> str:
        """Which labels all examples have, or none, and over how many labels the mean then is."""
        share = truth.float().mean(0)
        constant = [name for name, mean in zip(outputs, share.tolist(), strict=True) if mean in (0.0, 1.0)]
        if not constant:
            return ""
        rest = len(outputs) - len(constant)
        over = f"the mean is over {rest} of {len(outputs)} labels" if rest else "their mean is not either"
        return f"AUROC is not defined there for {', '.join(constant)}, which all examples have or none has; {over}"

    @torch.inference_mode()
    def examine(self, predict: Predict, batches: Labelled) -> Examined:
        """The mean AUROC and the mean cross-entropy of labelled batches."""
        kept, truth, loss = collected(self, predict, batches)
        if not len(truth):
            return Examined()
        areas = [area_under_roc(kept[:, label], truth[:, label] == 1) for label in range(truth.shape[1])]
        return Examined(mean_of_defined(areas), loss, len(truth))


@dataclass(eq=False)
class Units:
    """The mean and the standard deviation by which targets are standardized; both come after the network is made."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Regression(TaskRules):
    """A number per example, with a linear head, and a squared or a Huber loss.

    huber: delta of the Huber loss, in standard deviations of the targets; 0: the squared error
    units: by what targets are standardized

    The network learns targets that are standardized by the training targets of all sources together, so that rates that
    suit other tasks suit any unit. With data.scale = "none" they are learned as they are. The mean absolute error and
    all that is kept or shown is in the user's unit.
    """

    huber: float = 0.0
    units: Units = field(default_factory=Units, compare=False)
    metric: ClassVar[str] = REGRESSION.metric

    @classmethod
    def of(cls, data: DataSettings, train: TrainSettings) -> "Regression":
        """With `train.huber`."""
        return cls(train.huber)

    def use_units(self, mean: float, std: float) -> None:
        """Standardizes the targets by these numbers from now on."""
        self.units.mean, self.units.std = mean, std

    def head(self, features: int, outputs: int) -> nn.Module:
        """[B, features] to [B, 1]."""
        return nn.Linear(features, outputs)

    def loss(self, logits: Tensor, truth: Tensor) -> Tensor:
        """Mean squared or Huber loss of predictions [B, 1] and targets [B, 1], both standardized."""
        return self._losses(logits.float(), truth).mean()

    def _losses(self, logits: Tensor, truth: Tensor) -> Tensor:
        standardized = (truth - self.units.mean) / self.units.std
        if self.huber:
            return F.huber_loss(logits, standardized, reduction="none", delta=self.huber)
        return F.mse_loss(logits, standardized, reduction="none")

    def sums(self, logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """The absolute errors in the user's unit, and the losses of the standardized targets."""
        errors = (self.keep(logits) - truth).abs()
        return errors.sum().double(), self._losses(logits, truth).sum().double()

    def keep(self, logits: Tensor) -> Tensor:
        """Predictions [B, 1] in the user's unit."""
        return logits.float() * self.units.std + self.units.mean


def collected(rules: TaskRules, predict: Predict, batches: Labelled) -> tuple[np.ndarray, np.ndarray, float]:
    """(what the rules keep of all predictions [N, ...], the labels [N, ...], the mean loss) of labelled batches."""
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    total: Tensor | int = 0
    for images, truth in batches:
        logits = predict(images).float()
        _, loss = rules.sums(logits, truth)
        total = total + loss
        kept.append(rules.keep(logits))
        labels.append(truth)
    if not labels:
        return np.zeros((0, 1)), np.zeros(0), float("nan")
    truth = torch.cat(labels)
    return torch.cat(kept).cpu().numpy(), truth.cpu().numpy(), float(total) / len(truth)
