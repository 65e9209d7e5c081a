"""What a task requires of a network: its head, its loss, and the metrics of its predictions."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.common.tasks import CLASSIFICATION, SEGMENTATION, TASKS
from fedsim.models.surfaces import largest_components
from fedsim.settings import DataSettings, TrainSettings
from fedsim.settings.plugins import load

EVALUATION_BATCH = 256  # images in one forward pass that trains nothing, where no setting says how many
EPSILON = 1e-5  # eps of the soft Dice coefficient
Predict = Callable[[Tensor], Tensor]
Labelled = Iterable[tuple[Tensor, Tensor]]
NAN = float("nan")


@dataclass(frozen=True)
class Examined:
    """What labelled batches show of a model: the primary metric, the mean loss, the examples, and further numbers.

    The metric is NaN where it is not defined on these examples, for example an AUROC of one class.
    """

    value: float = NAN
    loss: float = NAN
    count: int = 0
    further: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskRules:
    """The consequences of a task.

    metric: its primary metric, under the name that columns use
    maps: the backbone gives features of every pixel, and the outputs are maps
    further: what a validation measures besides the metric
    """

    metric: ClassVar[str]
    maps: ClassVar[bool] = False
    further: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, data: DataSettings, train: TrainSettings) -> "TaskRules":
        """The rules with the settings of `[data]` and `[train]`."""
        return cls()

    def head(self, features: int, outputs: int) -> nn.Module:
        """The last layer, from features to logits."""
        raise NotImplementedError

    def loss(self, logits: Tensor, truth: Tensor) -> Tensor:
        """The training loss of a batch, a scalar."""
        raise NotImplementedError

    def soft(self, truth: Tensor, outputs: int) -> Tensor:
        """Labels as numbers that can be mixed, which `loss` takes too; those of masks are the masks."""
        return truth.float()

    def measure(self, predict: Predict, batches: Labelled) -> tuple[float, float, int]:
        """(primary metric, mean loss, examples) of labelled batches; NaN without any."""
        result = self.examine(predict, batches)
        return result.value, result.loss, result.count

    def use_units(self, mean: float, std: float) -> None:
        """Standardizes the targets by these numbers from now on, where the task has targets that are numbers."""

    @torch.inference_mode()
    def examine(self, predict: Predict, batches: Labelled) -> Examined:
        """What labelled batches show of a model; NaN without any.

        Metric and loss are means over single images, so that they do not depend on how the images are put into batches.
        Sums stay on the device until the end.
        """
        score: Tensor | int = 0
        loss: Tensor | int = 0
        count = 0
        for images, truth in batches:
            own_score, own_loss = self.sums(predict(images).float(), truth)
            score, loss, count = score + own_score, loss + own_loss, count + len(truth)
        return Examined(float(score) / count, float(loss) / count, count) if count else Examined()

    def sums(self, logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over a batch of the primary metric and of the loss of each image, exact numbers or float64."""
        raise NotImplementedError

    def for_truth(self, truth: Tensor) -> "TaskRules":
        """The rules by which a whole domain with this truth is measured, without outputs of which it has nothing."""
        return self

    def undefined(self, truth: Tensor, outputs: Sequence[str]) -> str:
        """Why the primary metric is not defined on a domain with this truth, or on a part of it; empty where it is."""
        return ""

    def keep(self, logits: Tensor) -> Tensor:
        """The form in which a run keeps the logits of a batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class Classification(TaskRules):
    """One of M classes per image, with a linear head, cross-entropy and accuracy.

    weights: alpha_c of `train.class_weights`; empty: 1 for each class
    focal: gamma of `train.focal`

    Both act on the training loss alone: a validation's loss is the cross-entropy.
    """

    weights: tuple[float, ...] = ()
    focal: float = 0.0
    metric: ClassVar[str] = CLASSIFICATION.metric
    blind: ClassVar[str] = "accuracy there is the share of {} that is recognized"  # what one class leaves of the metric

    @classmethod
    def of(cls, data: DataSettings, train: TrainSettings) -> "Classification":
        """With `train.class_weights` and `train.focal`."""
        return cls(tuple(train.class_weights), train.focal)

    def head(self, features: int, outputs: int) -> nn.Module:
        """[B, features] to [B, M]."""
        return nn.Linear(features, outputs)

    def loss(self, logits: Tensor, truth: Tensor) -> Tensor:
        """Cross-entropy of logits [B, M] and labels [B], or shares of the classes [B, M]; perhaps weighted and focal.

            mean_i sum_c q_ic alpha_c (1 - p_ic)^gamma (-log p_ic)          q: one-hot labels, or shares

        Source: Lin et al., ICCV 2017; FLamby's loss of Fed-ISIC2019. The mean is over images, as there, and not divided
        by the sum of their weights, as in PyTorch's cross-entropy.
        """
        if not self.weights and not self.focal:
            return F.cross_entropy(logits.float(), truth)
        log_p = logits.float().log_softmax(dim=1)
        shares = truth if truth.is_floating_point() else self.soft(truth, logits.shape[1])
        losses = -shares * log_p
        if self.focal:
            losses = losses * (1 - log_p.exp()) ** self.focal
        if self.weights:
            losses = losses * on_device(self.weights, logits.device)
        return losses.sum(1).mean()

    def soft(self, truth: Tensor, outputs: int) -> Tensor:
        """One-hot labels [B, M]."""
        return F.one_hot(truth, outputs).float()

    def sums(self, logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """Correct predictions and cross-entropy."""
        return (logits.argmax(dim=1) == truth).sum(), F.cross_entropy(logits, truth, reduction="sum").double()

    def undefined(self, truth: Tensor, outputs: Sequence[str]) -> str:
        """What a domain of one class leaves undefined; empty for a domain with several."""
        present = truth.unique().tolist()
        if len(present) != 1:
            return ""
        others = ", ".join(name for place, name in enumerate(outputs) if place != present[0])
        return f"it has no example of {others}, so that {self.blind.format(outputs[present[0]])}"

    def keep(self, logits: Tensor) -> Tensor:
        """Probabilities [B, M]. For log-probabilities, which some inference rules give, the softmax is the same."""
        return logits.float().softmax(dim=1)


CLASSIFIES = Classification()


@dataclass(frozen=True)
class Segmentation(TaskRules):
    """Q structures per image, which may overlap, with a 1x1 convolution, one sigmoid each, soft Dice loss, and Dice.

    threshold: a pixel belongs to a structure when its probability is greater
    largest_component: only the largest connected component of a predicted structure counts

    Both settings act only on predictions; ELCFS's code has the threshold 0.75 and keeps the largest component.

    measured: the structures of which Dice is taken, by their places; None: all
    """

    threshold: float = 0.5
    largest_component: bool = False
    measured: tuple[int, ...] | None = None
    metric: ClassVar[str] = SEGMENTATION.metric
    maps: ClassVar[bool] = True

    @classmethod
    def of(cls, data: DataSettings, train: TrainSettings) -> "Segmentation":
        """With `data.mask_threshold` and `data.largest_component`."""
        return cls(data.mask_threshold, data.largest_component)

    def head(self, features: int, outputs: int) -> nn.Module:
        """[B, features, H, W] to [B, Q, H, W]."""
        return nn.Conv2d(features, outputs, 1)

    def loss(self, logits: Tensor, truth: Tensor) -> Tensor:
        """Soft Dice loss of logits and masks [B, Q, H, W], over the whole batch."""
        return soft_dice_loss(logits.float().sigmoid(), truth)

    def keep(self, logits: Tensor) -> Tensor:
        """Predicted masks, uint8 [B, Q, H, W]."""
        predicted = logits.float().sigmoid() > self.threshold
        return largest_components(predicted) if self.largest_component else predicted.to(torch.uint8)

    def sums(self, logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """Dice of the predicted masks and soft Dice loss, each a mean over the structures of an image."""
        each = 1 - soft_dice(logits.sigmoid(), truth, dims=(2, 3))
        dice = dice_of(self.keep(logits), truth)
        measured = dice if self.measured is None else dice[:, list(self.measured)]
        return measured.mean(1).sum(), each.mean(1).sum().double()

    def for_truth(self, truth: Tensor) -> "Segmentation":
        """The rules that take Dice of the structures that occur in some image: of the others it would be 1 or 0.

        Without any such structure, Dice is undefined (NaN).
        """
        occurs = truth.bool().any(3).any(2).any(0)
        if bool(occurs.all()):
            return self
        return replace(self, measured=tuple(occurs.nonzero()[:, 0].tolist()))

    def undefined(self, truth: Tensor, outputs: Sequence[str]) -> str:
        """Which structures have no pixel in any image."""
        absent = (~truth.bool().any(3).any(2).any(0)).nonzero()[:, 0].tolist()
        names = ", ".join(outputs[place] for place in absent)
        return f"no image has a pixel of {names}, so that Dice is taken without it" if names else ""


def mean_of_defined(values: Sequence[float]) -> float:
    """The mean of the values that are defined; NaN without any."""
    numbers = [value for value in values if not math.isnan(value)]
    return mean_of(numbers) if numbers else NAN


def mean_of(values: Sequence[float]) -> float:
    """The mean; that of one value is itself, for which NumPy takes as long as a small network."""
    return float(np.mean(values)) if len(values) > 1 else values[0]


def defined(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those that are NaN, which a reply leaves out. A NaN loss stays, so that it is refused."""
    return {name: value for name, value in metrics.items() if name.endswith("loss") or not math.isnan(value)}


@lru_cache(maxsize=8)
def on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers as a tensor that stays on the device, so that no step waits for a copy."""
    return torch.tensor(numbers, device=device)


def rules_of(task: str, data: DataSettings, train: TrainSettings) -> TaskRules:
    """The rules of a task by its name, with the settings of `[data]` and `[train]`; UserError for an unknown one."""
    if task not in TASKS:
        raise UserError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    return load(TASKS[task].rules, "task").of(data, train)


def soft_dice(s: Tensor, y: Tensor, dims: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    """D = (2 sum s y + eps) / (sum s + sum y + eps) over `dims`; s, y [B, Q, H, W], by default D [Q] of the batch."""
    y = y.to(s.dtype)
    return (2 * (s * y).sum(dims) + EPSILON) / (s.sum(dims) + y.sum(dims) + EPSILON)


def soft_dice_loss(s: Tensor, y: Tensor) -> Tensor:
    """1 - mean_q D_q of probabilities and masks [B, Q, H, W], with denominators that are not squared (ELCFS)."""
    return 1 - soft_dice(s, y).mean()


def dice_of(predicted: Tensor, truth: Tensor) -> Tensor:
    """Dice 2 |A and B| / (|A| + |B|) of masks [B, Q, H, W] as float64 [B, Q]; 1 where both are empty."""
    a, b = predicted.bool(), truth.bool()
    sizes = a.sum((2, 3)) + b.sum((2, 3))
    both = 2 * (a & b).sum((2, 3)).double()
    return torch.where(sizes > 0, both / sizes.clamp_min(1), 1.0)
