"""Which round of a run is reported, and what is to be said of its rounds: pure functions over the rows of rounds.csv.

The main rule is DomainBed's training-domain validation, which does not use the unseen domain. `oracle` looks at the
unseen domain's labels; it is an upper bound, always labelled so and never the main result.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import CLASSIFICATION, OF_CLASSES, SOURCE_TEST, less_is_better, task_of
from fedsim.records.columns import Columns
from fedsim.settings import RunSettings
from fedsim.settings.attackers import liars_text
from fedsim.settings.experiment import Experiment

if TYPE_CHECKING:
    import pandas as pd

Frame = Union[Columns, "pd.DataFrame"]
RULES = ("best_validation", "last", "oracle")
DEFAULT_RULE = RULES[0]
WORST_SOURCE = "worst"  # a rule of comparisons alone, because a run keeps no model of its round
RULE_TITLES = {
    "best_validation": "best source validation",
    "last": "last round",
    "oracle": "ORACLE: best round on the target, an upper bound",
    WORST_SOURCE: "best validation on the source domain where it is worst",
}
BUDGETS = ("images", "steps")
BUDGET_TOLERANCE = 0.05  # budgets that differ by less are alike
DIGITS = 9  # to which accuracies and their differences are compared
HELD_OUT = "validation_domain_"  # and the metric: column of rounds.csv with run.validation_domain
REPLIES = "clients"  # column of rounds.csv: the number of clients whose replies made the round
VALIDATED = "validated"  # column of rounds.csv: the number of clients that a mean validation is over, where it may vary
Rows = list[dict[str, str]]  # of rounds.csv, as text
BY_TITLES = {"loss": "loss", **OF_CLASSES}
VALIDATION_COLUMNS = {"aggregated": "mean_validation_", "local": "mean_local_validation_"}  # and the metric


def rule_title(rule: str, experiments: Iterable[Experiment]) -> str:
    """A rule in words: of `best_validation` also whose validation selected the round, where it is alike in all runs.

    The clients that lied in these runs are said with it, so that no table is without them.
    """
    runs = [experiment.run for experiment in experiments]
    title = _title_with_metric(rule, runs)
    attackers = [run.attackers for run in runs]
    liars = liars_text(attackers)
    if liars:
        return f"{title}, {liars}"
    return title


def _title_with_metric(rule: str, runs: Sequence[RunSettings]) -> str:
    metrics = {run.select_by for run in runs}
    if rule == DEFAULT_RULE and metrics - {"primary"}:
        usual = [run.model_copy(update={"select_by": "primary"}) for run in runs]
        by = "different metrics"
        if len(metrics) == 1:
            by = BY_TITLES[metrics.pop()]
        return f"{_title_of_runs(rule, usual)}, by {by}"
    return _title_of_runs(rule, runs)


def _title_of_runs(rule: str, runs: Sequence[RunSettings]) -> str:
    domains = sorted({run.validation_domain for run in runs} - {""})
    models = {run.select_on for run in runs if not run.validation_domain}
    if rule != DEFAULT_RULE or (not domains and models == {"aggregated"}):
        return RULE_TITLES[rule]
    if not models:
        return f"best validation on {' or '.join(domains)}, which no client has"
    if not domains and models == {"local"}:
        return f"{RULE_TITLES[rule]} of the local models"
    return "best validation"


def validation_column(experiment: Experiment, metric: str = CLASSIFICATION.metric) -> str:
    """The column of rounds.csv by which `run.select_on`, `select_by` and `validation_domain` select a round.

    metric: the task's primary metric.
    """
    by = experiment.run.select_by
    return primary_column(experiment, metric if by == "primary" else by)


def primary_column(experiment: Experiment, metric: str = CLASSIFICATION.metric) -> str:
    """The column of rounds.csv with a metric of the validation that selects a round; metric: the primary one."""
    run = experiment.run
    start = HELD_OUT if run.validation_domain else VALIDATION_COLUMNS[run.select_on]
    return start + metric


def upwards(values: Any, column: str) -> Any:
    """The values of a column, turned so that the greatest is the best."""
    return -values if less_is_better(column) else values


def select(rounds: "Frame", rule: str = "best_validation", column: str = "mean_validation_accuracy") -> dict[str, Any]:
    """Row of the selected round, among the rounds >= 1; rounds: a frame, or `Columns`.

    best_validation: the round with the best value of `column`, the first of equals. Left out are rounds with NaN, and
    rounds in which no client's reply was accepted, whose model is that of the round before.
    last: the last round.
    oracle: the round with the best primary metric (accuracy, Dice) on the target, the first of equals.
    Values are compared to nine digits (`comparable`).

    Raises UserError for an unknown rule, or when no round qualifies.
    """
    if rule not in RULES:
        raise UserError(f"unknown selection rule {rule!r}; {nearest(rule, RULES)}known: {', '.join(RULES)}")
    table = Columns.of(rounds)
    numbers = table.numbers("round")
    order = np.argsort(numbers, kind="stable")
    trained = order[numbers[order] >= 1]
    if not len(trained):
        raise UserError("no trained round to select from: the records hold round 0 only")
    made = trained
    if REPLIES in table:
        made = trained[table.numbers(REPLIES)[trained] != 0]
    if not len(made):
        raise UserError(f"no round was made: no client's reply was accepted in {len(trained)} rounds")
    if rule == "last":
        return table.row(trained[-1])
    task = task_of(table)
    column = f"target_{task.metric}" if rule == "oracle" else column
    if column not in table:
        raise UserError(f"the records have no column {column!r}, which the rule {rule!r} selects by")
    values = upwards(table.numbers(column)[made], column)
    if np.isnan(values).all():
        raise UserError(f"{column} is NaN in every round: the rule {rule!r} cannot select one")
    return table.row(made[first_best(values)])


def first_best(scores: np.ndarray) -> int:
    """The place of the greatest score, the first of those that are equal to nine digits; NaN is left out."""
    return int(np.nanargmax(comparable(scores)))


def last_is_best(scores: Sequence[float]) -> bool:
    """Whether `best_validation` selects the last of some rounds, given their scores; NaN stands for a round without."""
    values = np.asarray(scores, dtype=float)
    return not np.isnan(values).all() and first_best(values) == len(values) - 1


def is_better(score: float, best: float) -> bool:
    """Whether `best_validation` selects a round with this score and none before, of which the best has `best`.

    NaN stands for a round without a score, and for no such round before.

    >>> is_better(0.8, 0.8), is_better(0.8, math.nan), is_better(math.nan, 0.8)
    (False, True, False)
    """
    return not math.isnan(score) and not comparable(score) <= comparable(best)


def rounds_since_best(scores: Sequence[float]) -> int:
    """The number of rounds after the best one, given the scores of the rounds from 1 on; all where none has a score.

    >>> rounds_since_best([0.5, 0.8, 0.8, 0.7])
    2
    """
    values = np.asarray(scores, dtype=float)
    has_none = np.isnan(values).all()
    if has_none:
        return len(values)
    last = len(values) - 1
    return last - first_best(values)


def summary_row(
    experiment: Experiment,
    rounds: "Frame",
    label: str = "",
    transductive: bool = False,
    uses_target_unlabelled: bool = False,
    pooled: bool = False,
    target_images: int | None = None,
) -> dict[str, Any]:
    """The row of summary.csv: the run's results under every selection rule, and what a round cost.

    rounds: a frame, or `Columns`
    """
    table = Columns.of(rounds)
    numbers = table.numbers("round")
    row = {
        "experiment": experiment.name,
        "dataset": experiment.data.dataset,
        "backbone": experiment.model.backbone,
        "method": experiment.method_name,
        "label": label or experiment.method_name,
        "target": experiment.run.target,
        "seed": experiment.run.seed,
        "split_seed": experiment.data.seed_of_splits,
        "rounds": int(numbers.max()),
        "settings": experiment.settings_hash(),
        "transductive": transductive,
        "uses_target_unlabelled": uses_target_unlabelled,
        "pooled": pooled,
        "target_images": target_images,
    }
    metric = task_of(table).metric
    column = validation_column(experiment, metric)
    for rule in RULES:
        row |= _selected(table, rule, column, metric, bool(experiment.data.source_test))
    if experiment.run.validation_domain:
        row["validation_domain"] = experiment.run.validation_domain
    trained = table.chosen(numbers >= 1)
    # Of training, over all clients of the whole run, with preludes (round 0) and copies.
    for unit in BUDGETS:
        amount = _total(table, trained, unit)
        row[unit] = None if amount is None else int(amount)
    row["bytes_down_per_round"] = _mean(trained, "bytes_down")
    row["bytes_up_per_round"] = _mean(trained, "bytes_up")
    seconds = _present(trained, "round_seconds")
    row["seconds_per_round"] = float(np.median(seconds)) if len(seconds) else None
    row["train_seconds"] = _total(table, trained, "train_seconds")
    return row


def _selected(rounds: Columns, rule: str, column: str, metric: str, tests_sources: bool) -> dict[str, Any]:
    names = [f"target_{metric}", f"mean_validation_{metric}"]
    if tests_sources:
        names.append(f"mean_{SOURCE_TEST}{metric}")
    try:
        chosen = select(rounds, rule, column)
    except UserError:
        # A diverged run (NaN throughout) still leaves a summary; its empty cells say that nothing could be selected.
        return {f"{rule}_{name}": None for name in ("round", *names)}
    values = {f"{rule}_{name}": float(chosen.get(name, math.nan)) for name in names}
    return {f"{rule}_round": int(chosen["round"]), **values}


def _present(rounds: Columns, column: str) -> np.ndarray:
    """The numbers of a column without its empty cells; none without the column."""
    values = rounds.numbers(column) if column in rounds else np.empty(0)
    return values[~np.isnan(values)]


def _total(rounds: Columns, trained: Columns, column: str) -> float | None:
    """The sum of a column over all rounds; None without the column, and where a round of training lacks it."""
    if column not in rounds or np.isnan(trained.numbers(column)).any():
        return None
    return float(np.nansum(rounds.numbers(column)))


def _mean(rounds: Columns, column: str) -> float | int | None:
    values = _present(rounds, column)
    if not len(values):
        return None
    mean = float(np.mean(values))
    return int(mean) if mean.is_integer() else mean


def _made(row: Mapping[str, str]) -> bool:
    return _number(row.get(REPLIES)) != 0


def _number(text: str | None) -> float:
    try:
        return float(text) if text else float("nan")
    except ValueError:
        return float("nan")


def notes_on(rows: Rows, chosen: float) -> dict[str, str]:
    """What is to be said of a run's rounds, by kind; chosen: the round of `best_validation`, NaN where there is none.

    failed: `2 rounds` in which a client failed and others did not.
    unmade: `2 of 3 rounds` in which no client's reply was accepted.
    thin: `2 of 3 clients` where fewer clients validated in the selected round than in another one. A mean without the
    client of a hard domain is greater without a better model. In rounds that do not record the number, while the run
    stopped at every failure, all clients that trained validated.
    """
    failed = unmade = 0
    selected = most = math.nan  # clients that validated in the selected round, and in that with the most
    for row in rows:
        if not _made(row):
            unmade += 1
        elif _number(row.get("failed")) > 0:
            failed += 1
        if VALIDATED in row:
            validated = _number(row[VALIDATED] or row.get(REPLIES))
            most = np.fmax(most, validated)
            if int(row["round"]) == chosen:
                selected = validated
    notes = {}
    if failed:
        notes["failed"] = f"{failed} round{'s' if failed > 1 else ''}"
    if unmade:
        notes["unmade"] = f"{unmade} of {len(rows)} rounds"
    if selected < most:
        notes["thin"] = f"{selected:.0f} of {most:.0f} clients"
    return notes


def comparable(scores: Any) -> Any:
    """Scores rounded to nine digits, so that those are equal that are equal in exact arithmetic.

    A mean of accuracies is a sum of fractions, and its last bit depends on the order of the sum. The shift moves the
    borders of the rounding away from fractions such as 1/1024, which would lie exactly on one.
    """
    return np.round(scores + 2 * 10.0 ** -(DIGITS + 1), DIGITS)
