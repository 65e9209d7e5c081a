"""FedIIR's client term: it keeps a client's classifier gradient close to the mean of all clients' gradients."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.common.errors import UserError
from fedsim.parts.facts import Fact
from fedsim.settings.experiment import Experiment
from fedsim.settings.tuned import Tuned


def squared_distance(gradients: list[Tensor], references: list[Tensor]) -> Tensor:
    """The sum over all tensors of ||g - g_mean||^2, a scalar."""
    return torch.stack(
        [(gradient - mean).square().sum() for gradient, mean in zip(gradients, references, strict=True)]
    ).sum()


@dataclass(frozen=True)
class ClassifierAlignment(Term):
    """gamma ||grad_h F_batch(w) - g||^2, where grad_h is the gradient of the batch's cross-entropy by the classifier.

    Source: FedIIR (Guo et al., ICML 2023), phase 2. g is the clients' mean gradient. It is made before the training of
    each round from what `collect` returns (phase 1). The gradient of this term is of second order and reaches all
    parameters. The classifier is the network's linear head; the official code has a perceptron of three layers there,
    except on Rotated MNIST. Phase 1 runs in eval mode here, while the official code lets it change the server's running
    statistics. The paper weights clients equally, by the part `uniform`. `gamma = 0` gives FedAvg with those weights.

    gamma: the weight of the term. The official code has 1e-2 on Rotated MNIST, 5e-3 on VLCS, 1e-3 on PACS, 5e-4 on
    OfficeHome
    """

    gamma: Annotated[
        float, Field(ge=0), Tuned("5e-4,1e-3,5e-3,1e-2", "the official code's values for its data sets")
    ] = 1e-3
    bank: ClassVar[str] = "classifier_gradient"
    requires: ClassVar[dict[str, str]] = {"banks": "classifier_gradients"}
    discloses: ClassVar[str] = (
        "each round the mean gradient of the classifier, which shows class shares and mean features of classes"
    )
    assumes = (Fact.OWN_IMAGES,)  # a step that changes images itself is fine: phase 1 sees no client's changed
    columns: ClassVar[tuple[str, ...]] = ("classifier_distance",)

    def check(self, experiment: Experiment) -> None:
        """Raises UserError for a head whose gradient does not belong to a linear classifier."""
        if experiment.model.head == "text":
            raise UserError("classifier_alignment compares gradients of a linear classifier; set model.head = 'linear'")

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """The sum of the batch gradients of the received model, and the number of batches.

        The model is in eval mode. One pass is made over the training images, with the augmentation of the data set
        (`data.augment`).
        """
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
        counted = {"batches": np.array([len(starts)], np.float32)}
        return {name: total.cpu().numpy() for name, total in sums.items()} | counted

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The term with the g of this round, or None when gamma is 0."""
        if self.gamma == 0:
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
