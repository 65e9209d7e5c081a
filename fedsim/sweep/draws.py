"""DomainBed's protocol of tuning: draws of every method, of which the best counts for each unseen domain and trial.

The choice for a method, an unseen domain and a trial is a search of its own (`search_plan`), scored by the validation
of the sources. A draw belongs to its method and number, so that these searches have the same draws at random.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedsim.common.files import atomic_write
from fedsim.data import unseen_domains
from fedsim.results.record_files import read_record
from fedsim.results.recorder import csv_text
from fedsim.results.selection import DEFAULT_RULE
from fedsim.results.statistics import comparable
from fedsim.settings.experiment import read_experiment
from fedsim.sweep.plan import readers
from fedsim.sweep.sampler import RANDOM
from fedsim.sweep.search import ranking
from fedsim.sweep.search_plan import PlannedSearch, Search, Trial, plan_search
from fedsim.sweep.search_texts import values_of, write_trials

FILE = "tuned.csv"
NEAR = 0.01  # of validation: draws that are at most so much below the best one say how flat the choice was


@dataclass(frozen=True)
class Draws:
    """What is tuned, as the user gives it. seeds: one for each trial; draws: their number, the first is the file's."""

    methods: Sequence[str]
    targets: Sequence[str]
    seeds: Sequence[int]
    draws: int = 20
    sampler: str = RANDOM
    pruner: str = ""


def plan_draws(config: str, wanted: Draws, overrides: Sequence[str], preset: str) -> list[PlannedSearch]:
    """A search for every method, unseen domain and trial."""
    targets = wanted.targets
    if list(targets) == ["all"]:
        targets = unseen_domains(read_experiment(config, overrides, preset).data)
    shared, chooser = readers(), (wanted.sampler, wanted.pruner)
    axes = itertools.product(dict.fromkeys(wanted.methods), dict.fromkeys(targets), dict.fromkeys(wanted.seeds))
    return [
        plan_search(config, Search(method, [target], [seed], (), wanted.draws, 0, *chooser), overrides, preset, shared)
        for method, target, seed in axes
    ]


def chosen(plan: PlannedSearch, rule: str = DEFAULT_RULE) -> Trial | None:
    """The draw that counts: the first of those with the best score, or under `oracle` with the best target metric."""
    if rule == DEFAULT_RULE:
        return plan.ranked[0] if plan.ranked else None
    values = {trial.number: float(_measured(trial).get(_column(plan, rule), np.nan)) for trial in plan.ranked}
    ranks = ranking({number: None if np.isnan(value) else value for number, value in values.items()})
    return plan.trials[next(iter(ranks))] if ranks else None


def tuned_row(plan: PlannedSearch, rule: str = DEFAULT_RULE) -> dict[str, Any]:
    """The row of one choice: what was chosen, its result, that of the file's own values, and what the choice cost."""
    run, trial = plan.runs[0].run, chosen(plan, rule)
    best, own, choice = _measured(trial), _measured(plan.trials[0]), chosen(plan)
    different = [each for each in plan.trials if each.first == each.number]
    scores = np.array([each.score for each in different if each.score is not None])
    steps = [_steps(each) for each in different]
    return {
        "method": plan.search.method,
        "target": run.target,
        "seed": run.seed,
        "draw": trial.number if trial else None,
        "values": "; ".join(f"{key}={value}" for key, value in values_of(plan, trial).items()) if trial else None,
        "score": choice.score if choice else None,
        "median_score": float(np.median(scores)) if len(scores) else None,
        "near": int((comparable(scores) >= comparable(scores.max() - NEAR)).sum()) if len(scores) else None,
        "scored": len(scores),
        "draws": len(different),
        f"target_{plan.task.metric}": best.get(_column(plan, rule)),
        f"untuned_target_{plan.task.metric}": own.get(_column(plan, rule)),
        "steps": sum(steps),
        "untuned_steps": own.get("steps"),
        "run": trial.cells[0].folder.relative_to(plan.folder).as_posix() if trial else None,
    }


def _measured(trial: Trial | None) -> dict[str, Any]:
    """The summary of a draw's run; empty without one."""
    rows = read_record(trial.cells[0].folder / "summary.csv") if trial else pd.DataFrame()
    return {} if rows.empty else dict(rows.iloc[0])


def _steps(trial: Trial) -> float:
    """The steps of a draw; of one that was pruned those until then, whenever its process was ended."""
    rounds = read_record(trial.cells[0].folder / "rounds.csv")
    if 0 in trial.stopped:
        return rounds["steps"][rounds["round"] <= trial.stopped[0]].sum()
    return _measured(trial).get("steps") or (0 if rounds.empty else rounds["steps"].sum())


def _column(plan: PlannedSearch, rule: str) -> str:
    return f"{rule}_target_{plan.task.metric}"


def write_tuned(plans: Sequence[PlannedSearch], rows: Sequence[dict[str, Any]]) -> Path:
    """Write search.csv with all draws, and tuned.csv with the choices, into the experiment's folder."""
    for plan in plans:
        write_trials(plan)
    file = plans[0].folder / FILE
    atomic_write(file, csv_text(list(rows[0]), rows))
    return file
