"""A run that goes on for more rounds than it was begun with, where this equals a run of so many rounds."""

from collections.abc import Iterator
from pathlib import Path

from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.parts.part import part_name
from fedsim.records.reading import read_settings
from fedsim.records.record_files import is_finished
from fedsim.records.results import FILE as RESULTS
from fedsim.records.results import write_results
from fedsim.runs.checkpoint import FOLDER, STATE
from fedsim.settings.experiment import Experiment

ROUNDS = "train.rounds"


def goes_on(folder: Path, experiment: Experiment) -> bool:
    """Whether the folder holds a finished run of fewer rounds than the experiment has."""
    return is_finished(folder) and read_settings(folder).train.rounds < experiment.train.rounds


def reopen(folder: Path) -> None:
    """Remove the summary of a finished run that goes on: without it the run is one that was interrupted.

    Its row in results.csv goes with it. folder: the run's, three below that of the experiment
    """
    if is_finished(folder):
        (folder / "summary.csv").unlink(missing_ok=True)
        results = folder.parents[2]
        try:
            write_results(results)
        except UserError:  # no other run has finished
            (results / RESULTS).unlink(missing_ok=True)


def refuse_to_go_on(folder: Path, then: Experiment, now: Experiment, recipe: Recipe) -> None:
    """Raise UserError, with the first reason, where the run in a folder cannot go on for the rounds of `now`.

    then: the settings of the run in the folder, which differ from those of `now` in the number of rounds alone
    """
    reasons = list(_reasons(then, now, recipe))
    if is_finished(folder) and not (folder / FOLDER / STATE).is_file():
        reasons.append(
            "the states with which it ended were removed; set run.keep_state = true for a run that may go on later"
        )
    if reasons:
        raise UserError(
            f"{folder} holds a run of {then.train.rounds} rounds that cannot go on to {now.train.rounds}: "
            f"{reasons[0]}; choose another --output or name, or remove the folder"
        )


def _reasons(then: Experiment, now: Experiment, recipe: Recipe) -> Iterator[str]:
    """Why the first rounds of a run of more rounds are other ones."""
    train = then.train
    if now.train.rounds < train.rounds:
        yield "these are fewer rounds (train.rounds)"
    if train.schedule != "constant":
        yield (
            f"train.schedule = {train.schedule!r} spreads the learning rate over all rounds, so that a longer run has "
            "other rates from its start"
        )
    if recipe.prelude and train.budget != "paper":
        yield f"train.budget = {train.budget!r} takes what comes before round 1 from the work of all rounds"
    for _, part in recipe.pairs:
        if part.depends_on_rounds:
            yield f"{part_name(part)} spreads its work over all rounds (train.rounds), from the start of the run"
    if train.rounds % train.evaluate_every:
        yield (
            f"its last round was validated as such, and train.evaluate_every = {train.evaluate_every} validates that "
            "round in no longer run"
        )
