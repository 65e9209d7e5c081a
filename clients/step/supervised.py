"""The standard local step: forward, loss plus terms, backward, optimizer."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from clients.parts import Batch, LocalRound, Step, StepFunction


@dataclass(frozen=True)
class SupervisedStep(Step):
    """L = CE(h(f(x)), y) + sum of terms, one optimizer step (FedAvg's local step)."""

    def begin(self, round: LocalRound, terms: list[StepFunction]) -> StepFunction:
        """Step function over `round.net` and `round.optimizer`; returns the detached total loss."""
        net, optimizer = round.net, round.optimizer

        def step(batch: Batch) -> Tensor:
            with round.autocast():
                batch.features = net.features(batch.images)
                batch.logits = net.head(batch.features)
            batch.loss = F.cross_entropy(batch.logits.float(), batch.labels)
            loss = batch.loss
            for term in terms:
                loss = loss + term(batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step
