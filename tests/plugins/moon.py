"""MOON (Li et al., CVPR 2021): the features stay near the received model's, away from the client's previous ones."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim import Batch, LocalRound, Recipe, Term


@dataclass(frozen=True)
class Contrast(Term):
    """mu * mean_i -log( e^{cos(z,zg)/T} / (e^{cos(z,zg)/T} + e^{cos(z,zp)/T}) ), equation 3.

    z: features of the batch by the trained model; zg by the model received this round; zp by the model that this
    client trained last (in its first round the received one). `mu=0` gives FedAvg.
    """

    mu: Annotated[float, Field(ge=0)] = 1.0
    T: Annotated[float, Field(gt=0)] = 0.5

    def begin(self, round: LocalRound) -> Callable[[Batch], Tensor] | None:
        """Freezes the two models to which the features are compared."""
        if self.mu == 0:
            return None
        received = copy.deepcopy(round.net).eval().requires_grad_(False)
        previous, kept = copy.deepcopy(received), round.store.get("previous")
        if kept is not None:
            previous.load_state_dict(kept)

        def term(batch: Batch) -> Tensor:
            with torch.no_grad():
                near, far = received.features(batch.images), previous.features(batch.images)
            # the received model is the right one of the two: cross-entropy with class 0
            similarity = torch.stack([F.cosine_similarity(batch.features, other) for other in (near, far)], dim=1)
            loss = F.cross_entropy(similarity / self.T, torch.zeros_like(batch.labels))
            return self.mu * loss

        return term

    def end(self, round: LocalRound) -> None:
        """Keeps the trained model for this client's next round."""
        round.store.put("previous", round.net.state_dict())


moon = Recipe(terms=(Contrast(),), paper="Li et al., CVPR 2021")
