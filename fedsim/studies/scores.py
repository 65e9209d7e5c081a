"""What the runs of a search count for: the validation of a run, the score of several, their ranking, and who goes on.

A score comes from the source clients' validation alone. Nothing that was measured on a run's target is read, except
where that target is itself a source domain, as in the folds of a search over combinations.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from fedsim.analysis.statistics import ranks
from fedsim.common.errors import UserError
from fedsim.common.tasks import task_of
from fedsim.records.record_files import read_record
from fedsim.records.selection import DEFAULT_RULE, primary_column, select, validation_column
from fedsim.studies.plan import Cell

NOT_RUN, DIVERGED = "not run", "diverged"


def validation_of(cell: Cell, on_target: bool = False) -> float | str:
    """Return the validation of the round that `best_validation` selects, or the reason why the cell has none.

    on_target: the metric on the run's target in place of the validation, for a run whose target is a source domain

    A run in which a client failed has none either: a mean without the client of a hard domain is greater without a
    better model, so that such a trial could win.
    """
    rounds = read_record(cell.folder / "rounds.csv")
    if cell.state != "finished" or rounds.empty:
        return "failed" if cell.state == "failed" else NOT_RUN
    if "failed" in rounds and (rounds["failed"] > 0).any():
        return "a client failed"
    metric = task_of(rounds).metric
    column = validation_column(cell.experiment, metric)
    try:
        selected = select(rounds, DEFAULT_RULE, column)
    except UserError:  # NaN in every round
        return DIVERGED
    ranked_by = f"target_{metric}" if on_target else primary_column(cell.experiment, metric)
    value = float(selected[ranked_by])
    return DIVERGED if math.isnan(value) else value


def curve_of(cell: Cell) -> dict[int, float]:
    """Return {round: validation} of a cell as recorded so far, without round 0; empty for a failed one."""
    rounds = read_record(cell.folder / "rounds.csv")
    if cell.state == "failed" or rounds.empty:
        return {}
    column = primary_column(cell.experiment, task_of(rounds).metric)
    if column not in rounds:
        return {}
    trained = rounds[rounds["round"] > 0]
    numbers = trained["round"].astype(int)
    values = trained[column].astype(float)
    return dict(zip(numbers, values, strict=True))


def mean_score(values: Sequence[float | str]) -> float | None:
    """Return the mean over targets and seeds of the runs' values; None when a run has a reason in place of a value."""
    numbers = [value for value in values if not isinstance(value, str)]
    return float(np.mean(numbers)) if numbers and len(numbers) == len(values) else None


def ranking(scores: Mapping[int, float | None]) -> dict[int, int]:
    """Return {trial: rank} of the trials that have a score, the best first.

    Scores that are equal to nine digits share a rank; the first of their trials comes first.
    """
    scored = {trial: value for trial, value in scores.items() if value is not None}
    rank_of = ranks(pd.Series(scored, dtype=float)).astype(int)
    order = sorted(scored)
    order.sort(key=rank_of.get)  # stable: of one rank the first trial comes first
    return {trial: int(rank_of[trial]) for trial in order}


def stages(folds: int) -> list[int]:
    """Return the number of folds in each rung: one, half of them, all."""
    return sorted({1, math.ceil(folds / 2), folds})


def halve(scores: Mapping[int, float | None]) -> list[int]:
    """Return the candidates of the next rung: the best third of all but the base, and the base besides them.

    A candidate without a score is never kept.
    """
    order = list(ranking(scores))
    others = [number for number in order if number]
    size = len(scores.keys() - {0})
    best = others[: math.ceil(size / 3)]
    return [number for number in order if number in best or number == 0]
