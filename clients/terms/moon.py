"""MOON's client term: features stay close to the received model's and far from those of the client's previous model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from clients.tools.networks import frozen_copy
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Above, Only
from fedsim.settings.tuned import Tuned

PREVIOUS = "previous-model"  # the store's entry for the model that the client trained last


def contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """Mean over the batch of -log( e^{cos(z,zg)/T} / (e^{cos(z,zg)/T} + e^{cos(z,zp)/T}) ), a scalar.

    The features have the shape [B, D]. Gradients reach z alone. The code computes softplus((cos(z,zp) - cos(z,zg)) /
    T), which is equal.
    """
    near, far = (F.cosine_similarity(z.float(), other.detach().float()) for other in (z_global, z_previous))
    return F.softplus((far - near) / temperature).mean()


@dataclass(frozen=True)
class ModelContrast(Term):
    """mu * contrast(z, z_g, z_p; T), where z are the batch's features by the model in training.

    z_g are the features by the model received this round, and z_p those by the model that this client trained last (in
    its first round the received model). With `train.local_checks` that is the model of its last step, even if an
    earlier one was sent (our choice).

    Source: MOON (Li et al., CVPR 2021). The features are the input of the head: the output of the bottleneck, or of the
    insert `projection_head` on a network without a bottleneck. Both reference models are frozen and in eval mode. The
    official code has mu = 1 by default and 5 for CIFAR-10. `mu = 0` gives FedAvg and stores no model.

    mu: the weight of the term
    T: the temperature
    """

    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False
    assumes = (Fact.WHOLE_MODEL, Fact.ROWS)
    keeps_last_iterate: ClassVar[bool] = True

    mu: Annotated[float, Field(ge=0), Tuned("log:0.001:10", "the released code")] = 1.0
    T: Annotated[float, Field(gt=0), Only(mu=Above(0))] = 0.5
    columns: ClassVar[tuple[str, ...]] = ("contrast_loss",)

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Freezes the received and the previous model; returns None when mu is 0."""
        if self.mu == 0:
            return None
        received = frozen_copy(round.net)
        stored = round.store.get(PREVIOUS)
        previous = frozen_copy(round.net, stored) if stored is not None else received

        def term(batch: Batch) -> Tensor:
            with torch.no_grad(), round.autocast():
                z_global = received.features(batch.images)
                z_previous = z_global if previous is received else previous.features(batch.images)
            loss = contrast(batch.features, z_global, z_previous, self.T)
            round.tally("contrast_loss", loss)
            return self.mu * loss

        return term

    def end(self, round: LocalRound) -> None:
        """Stores the trained model for the next round."""
        if self.mu != 0:
            round.store.put(PREVIOUS, round.state_of())
