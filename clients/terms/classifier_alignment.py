"""FedIIR's client: classifier gradients near the mean of all clients'."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term


def squared_distance(gradients: list[Tensor], references: list[Tensor]) -> Tensor:
    """Sum over all tensors of ||g - g_mean||^2."""
    return torch.stack([(own - mean).square().sum() for own, mean in zip(gradients, references, strict=True)]).sum()


@dataclass(frozen=True)
class ClassifierAlignment(Term):
    """gamma ||grad_h F_batch(w) - g||^2,   grad_h the gradient of the batch's cross-entropy by the classifier

    FedIIR (Guo et al., ICML 2023), phase 2; baselines.md A.9. g is the clients' mean, made before each round's training
    from what `collect` returns (phase 1). The term's own gradient is of second order and reaches all parameters. The
    classifier is the network's linear head; the official code has a perceptron of three layers there except on Rotated
    MNIST. Phase 1 is in eval mode, where the official code moves the server's running statistics (baselines.md). The
    paper weighs clients equally: `method.weights = "uniform"`. `gamma = 0` gives FedAvg with those weights.

    gamma: 1e-2 on Rotated MNIST, 5e-3 on VLCS, 1e-3 on PACS, 5e-4 on OfficeHome in the official code
    """

    gamma: Annotated[float, Field(ge=0)] = 1e-3
    bank: ClassVar[str] = "classifier_gradient"
    requires: ClassVar[dict[str, str]] = {"banks": "classifier_gradients"}

    @property
    def discloses(self) -> str:
        """The gradient of a linear classifier says how often each class occurs, and its mean features."""
        return "each round the mean gradient of the classifier, which shows class shares and mean features of classes"

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """Sum of the batch gradients of the received model, in eval mode, in one pass over the data as it is trained
        on; and the number of batches."""
        net, data, size = round.net.eval(), round.data, round.train.batch_size
        order = round.rng("classifier gradient").permutation(data.examples)
        parameters = dict(net.head.named_parameters(prefix="head"))
        sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        starts = range(0, len(order), size)
        for start in starts:
            batch = data.batch(order[start : start + size])
            with torch.no_grad(), round.autocast():
                features = net.features(batch.images)
            with round.autocast():
                loss = F.cross_entropy(net.head(features).float(), batch.labels)
            for total, gradient in zip(sums.values(), torch.autograd.grad(loss, list(parameters.values()))):
                total += gradient
        return {name: total.cpu().numpy() for name, total in sums.items()} | {
            "batches": np.array([len(starts)], np.float32)
        }

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The term with this round's g; None when gamma is 0."""
        if self.gamma == 0 or round.phase != "train":
            return None
        parameters = dict(round.net.head.named_parameters(prefix="head"))
        mean = round.tensors(self.bank, "classifier_alignment")
        references = [mean[name] for name in parameters]

        def term(batch: Batch) -> Tensor:
            gradients = torch.autograd.grad(batch.loss, list(parameters.values()), create_graph=True)
            distance = squared_distance(list(gradients), references)
            round.tally("classifier_distance", distance)
            return self.gamma * distance

        return term
