"""FedLGF's client term: predictions agree with those of heads that were moved to where they change most."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from clients.parts import Batch, LocalRound, StepFunction, Term
from clients.tools.losses import at_least_float32
from clients.tools.networks import frozen_copy
from fedsim.common.errors import UserError
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import DECADE, Tuned

TINY = 1e-8  # is added to the lengths of rows
SCALES = {"weight": (0.1, 0.01), "singular": (10.0, 0.1)}  # of the random probe, and of the gradient


def unit_rows(values: Tensor) -> Tensor:
    """The rows of values [..., d], divided by their length + 1e-8."""
    return values / (values.norm(dim=-1, keepdim=True) + TINY)


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """(1/B) sum_i KL(softmax(target_i) || softmax(logits_i)), a scalar, of logits [B, M]."""
    return F.kl_div(logits.log_softmax(1), target.log_softmax(1), reduction="batchmean", log_target=True)


def worst_logits(head: nn.Linear, features: Tensor, reference: Tensor, draw: Tensor, form: str) -> Tensor:
    """The logits [B, M] of the head after an adversarial change of its weight W [M, d], without a gradient.

        "weight":    W + s_2 g,  g = the gradient in D of KL(softmax(reference) || softmax(head with W + s_1 D))
        "singular":  the same with the singular values, relu(S + s_1 D) and relu(S + s_2 g)

    D is `draw` with unit rows (of one row for "singular", the singular values), and g has unit rows too. features
    [B, d] and reference [B, M] are constants. s_1 and s_2 are 0.1 and 0.01 for weights, 10 and 0.1 for singular values.
    """
    first, second = SCALES[form]
    weight, features, reference = (at_least_float32(each.detach()) for each in (head.weight, features, reference))
    bias = None if head.bias is None else at_least_float32(head.bias.detach())
    changed: Callable[[Tensor], Tensor] = lambda change: weight + change  # noqa: E731
    if form == "singular":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        changed = lambda change: (left * (values + change).relu()) @ right  # noqa: E731
    with torch.enable_grad():
        probe = unit_rows(draw).requires_grad_()
        loss = divergence(reference, F.linear(features, changed(first * probe), bias))
        (gradient,) = torch.autograd.grad(loss, probe)
    return F.linear(features, changed(second * unit_rows(gradient)), bias).detach()


@dataclass(frozen=True)
class Flatness(Term):
    """beta KL(q || p) + gamma KL(q_g || p), where q are predictions of a head after an adversarial change.

    p = softmax(z) are the predictions of the model in training; q = softmax(head(h)) those of its own head on its own
    features h, with the head's weight changed by one gradient step that moves p away; q_g those of the received model's
    head and features h_g, with its weight changed likewise, away from the client's p. Both are constants. The step
    begins at a random change D of unit rows, and has unit rows itself; see `worst_logits`.

    Source: FedLGF (Yan and Guo, ECCV 2024), from the released code (cnyanhao/FedLGF 531ca86). Changes of weights and of
    singular values are both in the paper. The received model is in eval mode. The term needs one more forward pass, and
    two passes of the head for each q. `local = global_ = 0` gives FedAvg. The paper averages the models uniformly.

    local: beta, the weight of the client's own flatness
    global_: gamma, the weight of the received model's
    form: whether the head's "weight" is changed, or its "singular" values
    """

    signed_loss: ClassVar[bool] = False
    assumes = (Fact.WHOLE_MODEL, Fact.ROWS)

    local: Annotated[float, Field(ge=0), Tuned("log:0.01:1", DECADE)] = 0.1
    global_: Annotated[float, Field(ge=0), Tuned("log:0.01:1", DECADE)] = 0.1
    form: Literal["weight", "singular"] = "weight"
    columns: ClassVar[tuple[str, ...]] = ("local_flatness_loss", "global_flatness_loss")

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Freezes the received model; returns None when both weights are 0. UserError for a head that is not linear."""
        if self.local == self.global_ == 0:
            return None
        received, head = frozen_copy(round.net), round.net.head
        if not isinstance(head, nn.Linear) or not isinstance(received.head, nn.Linear):
            raise UserError("flatness changes the weight of a linear head, and this network has another head; use "
                            "model.head = 'linear', or another method")  # fmt: skip
        received_head = received.head
        shape = head.weight.shape if self.form == "weight" else (min(head.weight.shape),)

        def term(batch: Batch) -> Tensor:
            draws = batch.once(self, lambda: [torch.randn(shape).to(round.device) for _ in range(2)])
            own, theirs = draws
            with torch.no_grad(), round.autocast():
                features = received.features(batch.images)
            local = worst_logits(head, batch.features, batch.logits, own, self.form)
            fixed = worst_logits(received_head, features, batch.logits, theirs, self.form)
            losses = [divergence(target, at_least_float32(batch.logits)) for target in (local, fixed)]
            round.tally("local_flatness_loss", losses[0])
            round.tally("global_flatness_loss", losses[1])
            return self.local * losses[0] + self.global_ * losses[1]

        return term
