"""Ensembles of the clients' own tensors: their batch norms, or their classifiers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.net import Net


def mean_probabilities(logits: Sequence[Tensor]) -> Tensor:
    """The log of the mean of softmax(logits_k), with equal weights. Probabilities are averaged, not logits."""
    stacked = torch.stack([torch.log_softmax(each.float(), dim=1) for each in logits])
    return stacked.logsumexp(0) - math.log(len(logits))


@dataclass(frozen=True)
class EnsembleOfLocalBN(Infer):
    """One forward pass with the batch norm of each client and shared other weights; the mean of the softmax vectors.

    Source: Table 3 of FedIG-A (submission to ICLR 2023). The sets come from the bank `own_batch_norm`: those of the
    clients that have sent one, which with `train.clients_per_round` may be few in the first rounds. Until any client
    has sent a set (for the initial model) the averaged set is used.
    """

    bank: ClassVar[str] = "own_batch_norm"
    requires: ClassVar[dict[str, str]] = {"banks": "own_batch_norm"}

    discloses: ClassVar[str] = (
        "every client's own batch norm is kept by the server and sent to the "
        "unseen client, which reveals its activation moments to third parties"
    )

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """One network, called with each set in turn."""
        net.eval()
        if not uploads:
            return net

        def predict(images: Tensor) -> Tensor:
            return mean_probabilities([functional_call(net, dict(tensors), (images,)) for tensors in uploads])

        return predict


@dataclass(frozen=True)
class EnsembleOfHeads(Infer):
    """The mean of the softmax vectors of the clients' heads on the same features.

    Source: COPA (Wu and Gong, ICCV 2021). The heads come from the bank `heads`: those of the clients that have sent
    one. With `train.clients_per_round` these may be few in the first rounds. In the paper all clients take part, so
    that it has all K heads. Until any client has sent one (for the initial model) the network's own head is used.
    """

    bank: ClassVar[str] = "heads"
    requires: ClassVar[dict[str, str]] = {"banks": "heads"}

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """One pass of the extractor, then each head in turn."""
        net.eval()
        if not uploads:
            return net
        heads = [{name.removeprefix("head."): tensor for name, tensor in tensors.items()} for tensors in uploads]

        def predict(images: Tensor) -> Tensor:
            features = net.features(images)
            return mean_probabilities([functional_call(net.head, tensors, (features,)) for tensors in heads])

        return predict
