"""How a model predicts on an unseen domain. Standard: eval mode, one image at a time would do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Predict = Callable[[Tensor], Tensor]


class Infer:
    """An inference rule; `transductive` ones need batches of the unseen domain and are labelled so in results."""

    transductive: ClassVar[bool] = False

    def begin(self, net: nn.Module, batches: Callable[[], Iterable[Tensor]]) -> Predict:
        """Function images -> logits (or log-probabilities); `batches()` iterates over the unlabelled test images."""
        raise NotImplementedError


@dataclass(frozen=True)
class EvalMode(Infer):
    """The model in eval mode, with the averaged batch-norm statistics (baselines.md D.1)."""

    def begin(self, net: nn.Module, batches: Callable[[], Iterable[Tensor]]) -> Predict:
        """The network itself."""
        net.eval()
        return net


@dataclass(frozen=True)
class Recompute(Infer):
    """Batch-norm statistics estimated anew on the unseen domain's unlabelled images, one pass with cumulative average.

    SiloBN (Andreux et al. 2020), baselines.md A.4. Transductive: it sees the test images before predicting.
    """

    transductive: ClassVar[bool] = True

    @torch.no_grad()
    def begin(self, net: nn.Module, batches: Callable[[], Iterable[Tensor]]) -> Predict:
        """Resets the statistics, passes all test images once, then predicts in eval mode."""
        norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        net.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # cumulative average
            norm.train()
        for images in batches():
            net(images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        net.eval()
        return net


@torch.inference_mode()
def accuracy_and_loss(predict: Predict, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float, int]:
    """(accuracy, mean cross-entropy, examples) of labelled batches; sums stay on the device until the end."""
    correct: Tensor | int = 0
    loss: Tensor | float = 0.0
    count = 0
    for images, labels in batches:
        logits = predict(images).float()
        correct = correct + (logits.argmax(dim=1) == labels).sum()
        loss = loss + F.cross_entropy(logits, labels, reduction="sum").double()
        count += len(labels)
    return (float(correct) / count, float(loss) / count, count) if count else (float("nan"), float("nan"), 0)
