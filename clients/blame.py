"""Says which function of a user's own part gave a loss that cannot be trained on, once a round has failed.

A round that goes well asks for none of it. A round that failed is repeated with the functions of this file.
"""

import math
from collections.abc import Callable

from torch import Tensor

from clients.batch import Batch
from clients.local_round import LocalRound, StepFunction
from fedsim.common.errors import UserError
from fedsim.common.user_code import is_own, place_of
from fedsim.parts.part import settings_name


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
