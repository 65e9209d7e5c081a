"""What runs inside a sweep's worker process: one cell after the other, until told to stop or the sweep is gone."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedsim.errors import UserError
from fedsim.experiment import Experiment, parse_experiment
from fedsim.tasks import scores

Message = tuple[str, Any, Any]  # what Cell.hear takes
ORPHANED = 3
END = signal.SIGUSR1  # SIGINT is the sweep's, and Ray has its own word on SIGTERM


class Progress:
    """Callback that tells the sweep how far a cell is."""

    def __init__(self, tell: Callable[[Message], Any]) -> None:
        self._tell = tell

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Nothing to tell."""

    def on_round(self, row: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Round, and the primary metric on the target."""
        self._tell(("round", row["round"], dict(scores(row)).get("target")))

    def on_end(self, summary: dict[str, Any]) -> None:
        """Nothing to tell: the end of the run says it."""


def run_cell(settings: str, tell: Callable[[Message], Any]) -> Message:
    """Run (or resume) the experiment of these settings; how it ended. Imports stay warm between cells."""
    from fedsim.runtime.launch import launch

    try:
        launch(parse_experiment(settings), [Progress(tell)])
    except UserError as error:
        return "failed", str(error), None
    except Exception as error:
        reason = str(error).strip().splitlines()
        return "failed", reason[0] if reason else type(error).__name__, traceback.format_exc()
    return "finished", "", None


def worker(connection: Connection, gpus: tuple[str, ...]) -> None:
    """A worker process: takes settings, runs them, and tells how far it is, until told to stop or the signal END."""
    signal.signal(END, end)
    threading.Thread(target=die_with_parent, daemon=True).start()
    if gpus:  # read when CUDA is first used, which is later than this
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        while (settings := connection.recv()) is not None:
            connection.send(run_cell(settings, connection.send))
    except (EOFError, OSError):
        return


def end(number: int, frame: object) -> None:
    """End at once, with the Ray processes of a cell that has some.

    No exception is raised for it: in a library's callback it would be printed and lost.
    """
    try:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
    finally:
        os._exit(128 + number)


def die_with_parent() -> None:
    """End this process at once when the sweep's is gone, in the middle of a round too.

    A new sweep may be about to continue this run: nothing more may be written.
    """
    wait([parent_process().sentinel])
    os._exit(ORPHANED)
