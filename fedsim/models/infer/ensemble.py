"""Ensembles of what clients have of their own: batch norms, or classifiers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.models.infer.base import Batches, Infer, Predict, Uploads


def mean_probabilities(logits: Sequence[Tensor]) -> Tensor:
    """log of the mean of softmax(logits_k), equal weights; probabilities are averaged, not logits."""
    stacked = torch.stack([torch.log_softmax(each.float(), dim=1) for each in logits])
    return stacked.logsumexp(0) - math.log(len(logits))


@dataclass(frozen=True)
class EnsembleOfLocalBN(Infer):
    """One forward pass with each client's batch norm, shared remaining weights; mean of the softmax vectors.

    Baselines.md D.2; FedIG-A's Table 3. The sets come from the bank of the same name. Until a client has sent a set
    (the initial model) the averaged one is used.
    """

    bank: ClassVar[str] = "own_batch_norm"
    requires: ClassVar[dict[str, str]] = {"banks": "own_batch_norm"}

    discloses: ClassVar[str] = (
        "every client's own batch norm is kept by the server and shipped to the "
        "unseen client, which reveals its activation moments to third parties"
    )

    def begin(self, net: nn.Module, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """One network, called with each set in turn."""
        net.eval()
        if not uploads:
            return net

        def predict(images: Tensor) -> Tensor:
            return mean_probabilities([functional_call(net, dict(own), (images,)) for own in uploads])

        return predict


@dataclass(frozen=True)
class EnsembleOfHeads(Infer):
    """Mean of the softmax vectors of all clients' heads on one and the same features.

    COPA (Wu and Gong, ICCV 2021); baselines.md B.9. The heads come from the bank `heads`. Until a client has sent one
    (the initial model) the network's own head is used.
    """

    bank: ClassVar[str] = "heads"
    requires: ClassVar[dict[str, str]] = {"banks": "heads"}

    def begin(self, net: nn.Module, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """One pass of the extractor, then each head in turn."""
        net.eval()
        if not uploads:
            return net
        heads = [{name.removeprefix("head."): tensor for name, tensor in own.items()} for own in uploads]

        def predict(images: Tensor) -> Tensor:
            features = net.features(images)
            return mean_probabilities([functional_call(net.head, own, (features,)) for own in heads])

        return predict
