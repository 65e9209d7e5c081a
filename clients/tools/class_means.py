"""Mean features of the classes of one client: its prototypes."""

import torch
from torch import Tensor

from clients.budget import fedavg_amount
from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.models.layout import evaluating


class ClassMeans:
    """Sums [C, d] and counts [C] of the features of each class, on the device."""

    def __init__(self, classes: int, width: int, device: torch.device) -> None:
        self.sums = torch.zeros(classes, width, device=device)
        self.counts = torch.zeros(classes, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Adds a batch of features [B, d]."""
        self.sums.index_add_(0, labels, features.detach().float())
        self.counts.index_add_(0, labels, torch.ones(len(labels), device=self.counts.device))

    def record(self, sent: Tensor) -> dict[str, Tensor]:
        """`protos` and `classes` of those classes that have features and may be sent (bool [C])."""
        classes = (sent & (self.counts > 0)).nonzero()[:, 0]
        return {"protos": self.sums[classes] / self.counts[classes, None], "classes": classes}


class PrototypesOfRound(ClassMeans):
    """The mean feature of each class in a round; made in `begin`, and asked for its prototypes in `end`.

    The features are those of the last epoch, which has as many steps as one epoch of FedAvg. Of a step that passes a
    batch twice, the first pass counts.

    final_pass: the features are those of one more pass over the training images, without augmentation, by the trained
    model in eval mode
    """

    def __init__(self, round: LocalRound, final_pass: bool) -> None:
        super().__init__(round.classes, round.net.feature_dim, round.device)
        self.round, self.final_pass = round, final_pass
        epoch = round.train.model_copy(update={"epochs": 1, "iterations": 0})
        self._left = round.steps - fedavg_amount(round.data.examples, epoch).steps  # steps before the last epoch
        round.before_step.append(self._count)

    def _count(self) -> None:
        self._left -= 1

    def watching(self, part: Term, loss: StepFunction) -> StepFunction:
        """The loss of a term that also adds the features of a batch if it is one of the last epoch."""

        def term(batch: Batch) -> Tensor:
            if self._left <= 0 and not self.final_pass:
                batch.once(part, lambda: self.add(batch.features, batch.labels))
            return loss(batch)

        return term

    def prototypes(self, fewest: int) -> dict[str, Tensor]:
        """`protos` [n, d] and `classes` [n] of the classes that have at least `fewest` training images."""
        round, data = self.round, self.round.data
        if self.final_pass:
            with evaluating(round.net), torch.no_grad(), round.autocast():
                for images, labels in data.evaluation(data.training_positions(), round.train.batch_size):
                    self.add(round.net.features(images), labels)
        labels = data.labels[data.training_positions()]  # features are more where an image comes twice
        images = torch.bincount(labels, minlength=round.classes).to(round.device)
        return self.record(images >= fewest)


def means_disclosed(least: int, received: str) -> str:
    """What the means of classes with at least `least` images show; `received`: what the other clients get of them."""
    one = " (of a class with one image: that image's own feature)" if least == 1 else ""
    few = f" with at least {least} images" if least > 1 else ""
    return (
        f"each round the mean feature of every class{few} that the client holds{one}, and so which classes these are; "
        f"the other clients get {received}, and the unchanged mean of a class that only one client holds"
    )
