"""One client's steps in one round: what is fixed before the first one, and the best iterate among them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from clients.batch import Moment, Transfer
from clients.parts import Batch, ClientPart, LocalRound, StepFunction
from fedsim.common.values import Json
from fedsim.models.net import Net
from fedsim.settings import TrainSettings
from strategies.parts import Arrays

Order = Mapping[str, Json]  # the settings of a message
Measured = tuple[float, int, dict[str, float]]  # loss, number of validation examples, metrics
Trained = tuple[Arrays, int, dict[str, float]]  # tensors to send, number of training examples, metrics
Fitted = tuple[list[np.ndarray], int, dict[str, float]]  # the same without the names of the tensors


@dataclass
class Training:
    """A client's round between its beginning and its end: what parts see, what came, metrics so far, and its start."""

    round: LocalRound
    received: Arrays
    metrics: dict[str, float]
    started: float


@dataclass
class LocalSteps:
    """The steps of one client in one round.

    plan: positions of the training items of each step
    step: takes one step on a batch and returns its loss
    transfer, moment: what the recipe's augmentation does to images, and when
    after: functions to be called after every step
    total: sum of the losses, which stays on the device until the end
    """

    round: LocalRound
    work: TrainSettings
    plan: Sequence[np.ndarray]
    step: StepFunction
    transfer: Transfer | None
    moment: Moment
    best: "BestIterate"
    after: Sequence[Callable[[], None]]
    taken: int = 0
    total: Tensor | float = 0.0

    def __post_init__(self) -> None:
        self.total = torch.zeros((), device=self.round.device)

    def take(self, batch: Batch) -> None:
        """One step on a batch, and all that follows it; the companions get the batch as it was before the step."""
        functions = self.round.after_step
        before = replace(batch) if functions else batch
        loss = self.step(batch)
        for function in functions:
            function(before)
        self.took(loss)

    def took(self, loss: Tensor | None = None) -> None:
        """What follows a step: its loss is added (if given), layers are clipped, the iterate is validated if due."""
        self.taken += 1
        if loss is not None:
            self.total += loss
        for function in self.after:
            function()
        self.best.after_step(self.taken)

    def end(self, parts: Sequence[ClientPart]) -> None:
        """What follows the last step: the best iterate is restored, and the parts end, some of them before that."""
        for part in [part for part in parts if part.keeps_last_iterate]:
            part.end(self.round)
        self.round.best_step = self.best.restore()
        for part in [part for part in parts if not part.keeps_last_iterate]:
            part.end(self.round)


class BestIterate:
    """Keeps the model of the step with the best local validation by the primary metric; an undefined one keeps none.

    There are `checks` evenly spaced validations per round (every 20 of 200 steps: 10), the last one after the last
    step. Only a strict improvement counts, so that the first of equal models is kept. The whole state is restored to
    the best check: weights, running statistics, adapters. The optimizer's buffers remain those of the last step, and so
    do the models that a part keeps besides the network. FedNova and SCAFFOLD count the steps up to that check. A
    client's personal layers take part in its validation. 0 checks keep the last model and cost nothing.

    Source: the client-level selection of FedIG-A.
    """

    def __init__(self, net: Net, validate: Callable[[], float], steps: int, checks: int) -> None:
        self.net, self.validate = net, validate  # the greatest is best; it leaves the network in training mode
        self.due = {steps * check // checks for check in range(1, checks + 1)}
        self.score, self.step = -math.inf, 0
        self.state: dict[str, Tensor] = {}

    def after_step(self, number: int) -> None:
        """Validates after step `number` (counted from 1) when a check is due."""
        if number not in self.due:
            return
        score = self.validate()
        if score > self.score:
            self.score, self.step = score, number
            self.state = {name: value.clone() for name, value in self.net.state_dict().items()}

    def restore(self) -> int:
        """Restores the best model; returns its step, or 0 where there were no checks."""
        if self.state:
            self.net.load_state_dict(self.state)
        return self.step
