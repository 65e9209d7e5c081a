"""Prediction by the mean over draws of a stochastic representation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.infer.ensemble import mean_probabilities
from fedsim.models.inserts.representation import gaussian_of
from fedsim.models.net import Net
from fedsim.parts.facts import Fact

NOISE_SEED = 0


@dataclass(frozen=True)
class SampledRepresentation(Infer):
    """log p(y|x) = log (1/S) sum_s softmax(head(mu + sigma eps_s)). Probabilities are averaged, not logits.

    Source: FedSR (Nguyen et al., NeurIPS 2022). The same S draws eps_s are used for every image and in every round. The
    prediction for an image then depends neither on its batch nor on the order of the
    images. The rule is part of the method: source clients validate by it too. `method.infer = "eval_mode"`
    predicts from z = mu.

    S: the number of draws, 20 in the official code and 1 in FedDG_Benchmark
    """

    S: Annotated[int, Field(ge=1)] = 20
    on_sources: ClassVar[bool] = True
    assumes = (Fact.DRAWN_FEATURES,)

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """One pass of the backbone and S passes of the head."""
        net.eval()
        generator = torch.Generator().manual_seed(NOISE_SEED)
        weights = next(net.parameters())
        noise = torch.randn(self.S, net.feature_dim, generator=generator).to(weights.device)

        def predict(images: Tensor) -> Tensor:
            mean, std = gaussian_of(net.features(images), "sampled_representation")
            return mean_probabilities([net.head((mean + std * eps).to(weights.dtype)) for eps in noise])

        return predict
