"""What is removed from a run's folder: all of an attempt that could not start, and what only resuming needs.

The same command with other settings is then not refused.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsim.records.reading import read_settings
from fedsim.records.results import add_result, write_results
from fedsim.runs.checkpoint import FOLDER, STATE
from fedsim.runs.claim import free
from fedsim.runs.plan import results_folder
from fedsim.runs.privacy_account import BEGUN
from fedsim.settings.experiment import Experiment

WRITTEN = ("experiment.toml", "environment.json", "checkpoint", "state")  # by a session before its first round
STATES = (FOLDER, "state")  # the checkpoint, and what clients keep between rounds


@contextmanager
def nothing_left(folder: Path, ours: Callable[[], bool]) -> Iterator[None]:
    """Remove what an attempt that fails before its first record has written into a new run's folder.

    It would begin from the start again in any case. A folder in which an earlier attempt wrote settings stays as it is,
    and so does one of a private run of which a round has begun: that round counts.

    ours: whether this process still has its claim on the folder; another one's files stay as they are
    """
    fresh = not (folder / WRITTEN[0]).exists()
    try:
        yield
    except Exception:
        begun = (folder / "rounds.csv", folder / "checkpoint" / STATE, folder / "checkpoint" / BEGUN)
        if fresh and ours() and not any(file.is_file() for file in begun):
            _remove(folder)
        raise


def _remove(folder: Path) -> None:
    for name in WRITTEN:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_empty(folder: Path, output: Path) -> None:
    """Remove a run's folder and those above it, below the output, as far as they are empty."""
    while folder != output and output in folder.parents:
        try:
            folder.rmdir()
        except OSError:  # it is not empty, or it is not there
            if folder.exists():
                return
        folder = folder.parent


def end_run(folder: Path, experiment: Experiment) -> None:
    """Remove the checkpoint and client states of a run that has just finished, and add its row to results.csv.

    With `run.keep_state` they stay, because the run may go on for more rounds. If the run is killed before, the next
    command does it (`tidy_finished`).
    """
    if not experiment.run.keep_state:
        _remove_state(folder)
    free(folder)
    add_result(results_folder(experiment), folder)


def tidy_finished(experiment: Path, runs: Iterable[Path]) -> None:
    """Remove checkpoints, client states and dead claims of an experiment's finished runs, and write its results.csv.

    Runs with `run.keep_state` keep their checkpoints and states.
    """
    for folder in runs:
        has_state = any((folder / name).exists() for name in STATES)
        if has_state and not read_settings(folder).run.keep_state:
            _remove_state(folder)
        free(folder)
    write_results(experiment)


def _remove_state(folder: Path) -> None:
    for name in STATES:
        shutil.rmtree(folder / name, ignore_errors=True)
