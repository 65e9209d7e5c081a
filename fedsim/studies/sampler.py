"""Optuna's samplers and pruners, asked in the order of the trials: each depends on the trials before it alone."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.common.about import optional
from fedsim.common.errors import UserError, nearest
from fedsim.settings.experiment import parse_override
from fedsim.studies.space import Knob

RANDOM = "random"
SAMPLERS = {"tpe": "TPESampler", "gp": "GPSampler"}  # our names, and the classes of optuna.samplers
PRUNERS = {"median": "MedianPruner", "halving": "SuccessiveHalvingPruner"}  # and of optuna.pruners


def check_sampler(sampler: str, pruner: str = "") -> None:
    """UserError for an unknown sampler or pruner, or where Optuna is not installed."""
    choices = (
        ("sampler", sampler, [RANDOM, *SAMPLERS]),
        ("pruner", pruner, ["", *PRUNERS]),
    )
    for kind, name, names in choices:
        if name not in names:
            listed = ", ".join(filter(None, names))
            raise UserError(f"no {kind} is called {name!r}; {nearest(name, names)}known: {listed}")
    if sampler != RANDOM or pruner:
        import_optuna()


def import_optuna() -> Any:
    """The package optuna, which then says nothing of itself."""
    optuna = optional("optuna", "the samplers tpe and gp, and pruners, need Optuna", "optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def suggest(
    sampler: str,
    seed: int,
    knobs: Sequence[Knob],
    earlier: Sequence[tuple[Mapping[str, Any], float]],
) -> dict[str, str]:
    """Return the values of the next trial as texts of overrides. earlier: (values, score) of the trials before it.

    Values that lie outside of their spaces, as those of a file may, are not shown to the sampler.
    """
    optuna = import_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        chooser = getattr(optuna.samplers, SAMPLERS[sampler])(seed=seed % 2**32)
    study = optuna.create_study(direction="maximize", sampler=chooser)
    spaces = {knob.key: _distribution(optuna, knob) for knob in knobs}
    for values, score in earlier:
        params = {}
        distributions = {}
        for knob in knobs:
            value = _inside(knob, values[knob.key])
            if value is not None:
                params[knob.key] = value
                distributions[knob.key] = spaces[knob.key]
        trial = optuna.trial.create_trial(params=params, distributions=distributions, value=score)
        study.add_trial(trial)
    chosen = study.ask(spaces).params
    texts = {}
    for knob in knobs:
        value = chosen[knob.key]
        texts[knob.key] = value if knob.kind == "choice" else knob.rounded(value)
    return texts


def pruned_rounds(pruner: str, curves: Sequence[Mapping[int, float]], spared: int) -> list[int | None]:
    """For each trial the round after which it is pruned, by its own curve and those of the trials before it, or None.

    curves: {round: validation} of every trial, as far as it is known; spared: the number of first trials, which are
    never pruned
    """
    optuna = import_optuna()
    study = optuna.create_study(direction="maximize", pruner=getattr(optuna.pruners, PRUNERS[pruner])())
    last_rounds = []
    for number, curve in enumerate(curves):
        trial = study.ask()
        last = _last_round(trial, curve, may_be_pruned=number >= spared)
        scores = [value for value in curve.values() if not math.isnan(value)]
        if not scores:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        elif last is None:
            study.tell(trial, max(scores), state=optuna.trial.TrialState.COMPLETE)
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        last_rounds.append(last)
    return last_rounds


def _last_round(trial: Any, curve: Mapping[int, float], may_be_pruned: bool) -> int | None:
    """The round after which Optuna prunes a trial with this curve; None where it does not."""
    for number, value in curve.items():
        trial.report(value, number)
        if trial.should_prune() and may_be_pruned:
            return number
    return None


def _distribution(optuna: Any, knob: Knob) -> Any:
    kinds = optuna.distributions
    if knob.kind == "choice":
        return kinds.CategoricalDistribution(knob.choices)
    if knob.kind == "int":
        return kinds.IntDistribution(int(knob.low), int(knob.high))
    return kinds.FloatDistribution(knob.low, knob.high, log=knob.kind == "log")


def _inside(knob: Knob, value: Any) -> Any:
    """A value as its distribution has it; None when it is not in the space."""
    if knob.kind == "choice":
        for text in knob.choices:
            if parse_override(f"{knob.key}={text}")[1] == value:
                return text
        return None
    is_inside = isinstance(value, int | float) and knob.low <= value <= knob.high
    return value if is_inside else None
