"""One client's steps in one round: what is fixed before the first one, and the best iterate among them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from clients.batch import Moment, Transfer
from clients.parts import Batch, ClientPart, LocalRound, StepFunction
from fedsim.common.errors import UserError
from fedsim.common.user_code import is_own, place_of
from fedsim.common.values import Json
from fedsim.models.net import Net
from fedsim.parts.part import settings_name
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


# --- which part of a user's own gave a loss that cannot be trained on ------------------------------------------------


def steps_taken(begin: Callable[[], Training], take: Callable[..., float]) -> tuple[Training, float]:
    """(the round after its last step, the mean loss). A round that goes well looks at no value.

    A round whose loss is not finite, or that ends in an error, is repeated with `is_watched`. UserError then names a
    term or an objective from outside fedsim whose value is no finite number.
    """
    training = begin()
    try:
        loss = take(training.round)
    except (RuntimeError, TypeError) as error:
        if has_own_loss(training.round) and not isinstance(error, torch.OutOfMemoryError):
            _repeat(begin, take)
        raise
    if not math.isfinite(loss) and has_own_loss(training.round):
        training = begin()
        loss = take(training.round, is_watched=True)
    return training, loss


def _repeat(begin: Callable[[], Training], take: Callable[..., float]) -> None:
    """Repeats a round that ended in an error. Only a UserError leaves it; any other is the one that came before."""
    try:
        take(begin().round, is_watched=True)
    except UserError as error:
        raise error from None
    except Exception:
        return


def has_own_loss(round: LocalRound) -> bool:
    """Whether a term or the objective of the round is a function from outside fedsim."""
    return any(not is_own(function) for function in (*round.terms, round.objective) if function)


def watch(round: LocalRound, step: Callable[[], int]) -> None:
    """Lets the round's terms and objective from outside raise UserError where their value is no finite number.

    step: the number of the present step, from 1
    """
    round.terms = [watched(term, "term", step) for term in round.terms]
    if round.objective:
        round.objective = watched(round.objective, "objective", step)


def watched(function: StepFunction, slot: str, step: Callable[[], int]) -> StepFunction:
    """The same function, which raises UserError where its value is no finite number; fedsim's own as it is."""
    if is_own(function):
        return function

    def checked(batch: Batch) -> Tensor:
        value = function(batch)
        reason = fault(value)
        if reason and (slot == "objective" or not fault(batch.loss)):  # a broken model makes every term nan
            name = settings_name(function.__qualname__.partition(".")[0])
            raise UserError(f"the {slot} {name} {reason} at step {step()} ({place_of(function)}); {advice(value)}")
        return value

    return checked


def fault(value: object) -> str:
    """Why a value cannot be a loss; empty: it can."""
    if isinstance(value, Tensor) and value.ndim:
        return f"returned a tensor of shape {list(value.shape)}"
    if not isinstance(value, Tensor | float | int):
        return f"returned {'None' if value is None else type(value).__name__}"
    number = float(value.detach()) if isinstance(value, Tensor) else value
    return "" if math.isfinite(number) else f"was {number}"


def advice(value: object) -> str:
    """What to do about a value that cannot be a loss."""
    if value is None:
        return "it returns one number: is its `return` missing?"
    if isinstance(value, Tensor) and not value.ndim:
        return "look there for a division by 0, a logarithm or a root of 0, and an overflow"
    return "it returns one number, as by `.mean()`"
