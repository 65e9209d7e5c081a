"""What a search shows and writes: the table of its trials, the settings of the best one, and search.csv."""

import csv
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from rich.markup import escape
from rich.table import Table

from fedsim.common.console import console, say
from fedsim.common.files import atomic_write
from fedsim.results.differences import short_names, value_text
from fedsim.results.recorder import csv_text
from fedsim.results.selection import validation_column
from fedsim.settings.experiment import parse_override
from fedsim.sweep.axes import given_words
from fedsim.sweep.sampler import RANDOM
from fedsim.sweep.search import nested
from fedsim.sweep.search_plan import PlannedSearch, Trial

NEW_SEEDS = 3
NAMES = ("method", "search", "trial")
RESULTS = ("rank", "score", "scored_by", "outcome", "cells", "finished", "failed", "repeats")


def trial_table(plan: PlannedSearch) -> Table:
    """The trials, the best first and those without a score last; nothing of the unseen domain is in it."""
    ranks, names = plan.ranks, short_names([knob.key for knob in plan.knobs])
    table = Table("rank", "trial", *map(escape, names), f"validation {plan.task.title}", "cells finished")
    others = [trial for trial in plan.trials if trial.first == trial.number and trial.number not in ranks]
    for trial in [*plan.ranked, *others]:
        scored = trial.outcome if trial.score is None else percent(trial.score)
        values = map(escape, values_of(plan, trial).values())
        name = str(trial.number) if trial.number else "0 (file)"
        finished = f"{trial.count('finished')}/{len(trial.cells)}"
        table.add_row(str(ranks.get(trial.number, "")), name, *values, scored, finished)
    return table


def values_of(plan: PlannedSearch, trial: Trial) -> dict[str, str]:
    """The values of a trial as text; those of trial 0 are the file's own."""
    return trial.values or {key: value_text(value) for key, value in plan.own.items()}


def percent(value: float) -> str:
    """A fraction as tables print it."""
    return f"{100 * value:.1f} %"


def show_result(plan: PlannedSearch) -> None:
    """Print the ranking, the settings of the best trial in two forms, and what its score does not say."""
    console.print(trial_table(plan))
    repeated = sum(trial.first != trial.number for trial in plan.trials)
    if repeated:
        say(f"trials whose values an earlier one has, and which are not run again: {repeated}")
    say(f"all trials: {plan.folder / 'search.csv'}")
    if not plan.ranked:
        say("No trial has a score: each has a cell that failed, diverged or was not run.")
        return
    best, own = plan.ranked[0], plan.trials[0]
    assert best.score is not None  # as of every ranked trial
    against = "" if best is own or own.score is None else f"; the file's own values: {percent(own.score)}"
    say(f"best: trial {best.number}, {percent(best.score)}{against}")
    if best is own:
        say("These are the file's own values: nothing is to be changed.")
    else:
        say("\n" + tomli_w.dumps(nested({key: parse_override(f"{key}={v}")[1] for key, v in best.values.items()})))
        say(" ".join(f"--set {shlex.quote(f'{key}={text}')}" for key, text in best.values.items()))
    for line in caveats(plan):
        say(line)
    last = max(plan.search.seeds)
    say(plan.command(range(last + 1, last + 1 + NEW_SEEDS), best.values))


def caveats(plan: PlannedSearch) -> list[str]:
    """What the reader of a ranking must know, the reason for new seeds last."""
    lines = []
    if len(plan.targets) > 1:
        lines.append(
            "One setting is chosen for all targets. The images of each target validate the runs of the others; "
            "to keep a target unseen by the choice, too, search with --targets for it alone."
        )
    if len(set(plan.search.seeds)) == 1:
        lines.append("With one seed, the differences between trials may be noise.")
    chosen = len({trial.first for trial in plan.trials})
    lines.append(
        f"The best of {chosen} trials was chosen by its score, which is therefore too favourable. "
        "Run it with new seeds before you report it:"
    )
    return lines


def trial_rows(plan: PlannedSearch) -> list[dict[str, Any]]:
    """The rows of search.csv, one per trial."""
    ranks = plan.ranks
    targets, seeds = ",".join(plan.targets), ",".join(str(seed) for seed in dict.fromkeys(plan.search.seeds))
    space = "; ".join(knob.text for knob in plan.knobs)
    words = [f"{space}; targets {targets}; seeds {seeds}; search seed {plan.search.seed}"]
    words += given_words(plan.overrides, plan.preset)
    words += [] if plan.search.sampler == RANDOM else [f"sampler {plan.search.sampler}"]
    return [
        {"method": plan.search.method, "search": "; ".join(words), "trial": trial.number}
        | values_of(plan, trial)
        | {
            "rank": ranks.get(trial.first),
            "score": trial.score,
            "scored_by": validation_column(plan.runs[0], plan.task.metric),
            "outcome": trial.outcome or "scored",
            "cells": len(trial.cells),
            "finished": trial.count("finished"),
            "failed": trial.count("failed"),
            "repeats": trial.first if trial.first != trial.number else None,
        }
        for trial in plan.trials
    ]


def rows_of_others(file: Path, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The rows of a file that other searches have written, whose `names` (columns) have other values than in `rows`."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    ours = {tuple(row[name] for name in names) for row in rows}
    written = [row for row in csv.DictReader(text.splitlines()) if row.keys() >= set(names)]
    return [row for row in written if tuple(row[name] for name in names) not in ours]


def write_trials(plan: PlannedSearch) -> None:
    """Write search.csv into the experiment's folder.

    The rows of other searches (with another method, space or setting) are kept.
    """
    file = plan.folder / "search.csv"
    rows = trial_rows(plan)
    rows = [*rows_of_others(file, NAMES[:2], rows), *rows]
    keys = dict.fromkeys(key for row in rows for key in row if key and key not in (*NAMES, *RESULTS))
    atomic_write(file, csv_text([*NAMES, *keys, *RESULTS], rows))
