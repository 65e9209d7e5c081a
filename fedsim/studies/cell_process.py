"""The code of a sweep's worker process. It runs one cell after the other until the sweep stops it or has ended."""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.common.errors import ClaimedError, UserError
from fedsim.common.tasks import scores
from fedsim.records.callbacks import RunCallback
from fedsim.settings.experiment import parse_experiment

if TYPE_CHECKING:
    from fedsim.studies.plan import Cell

Message = tuple[str, Any, Any]  # the arguments of Cell.note
ORPHANED = 3
END = signal.SIGUSR1  # SIGINT is for the sweep only, and Ray installs its own handler of SIGTERM


class Once(logging.Filter):
    """Lets each text through once, because most cells of a sweep have the same remarks."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the text has not been printed before by this process."""
        text = record.getMessage()
        is_new = text not in self._seen
        self._seen.add(text)
        return is_new


class Progress(RunCallback):
    """A callback that tells the sweep the progress of a cell."""

    def __init__(self, tell: Callable[[Message], Any]) -> None:
        self._tell = tell

    def on_round(self, row: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Send the round and its primary metric on the target."""
        self._tell(("round", row["round"], dict(scores(row)).get("target")))


def run_cell(settings: str, tell: Callable[[Message], Any]) -> Message:
    """Run (or resume) the experiment with these settings; returns a message that says how it ended.

    A process runs many cells, so that they need not import all modules again.
    """
    from fedsim.runs.plan import resolve
    from fedsim.runtime.launch import play

    try:
        experiment = parse_experiment(settings)
        if not experiment.run.processes:  # other cells, which run at the same time, use the other cores
            experiment = experiment.replace(run={"processes": 1})
        play(resolve(experiment), [Progress(tell)])
    except ClaimedError as error:
        return "claimed", str(error), None
    except UserError as error:
        return "failed", str(error), None
    except Exception as error:
        reason = str(error).strip().splitlines()
        return "failed", reason[0] if reason else type(error).__name__, traceback.format_exc()
    finally:
        release_memory()
    return "finished", "", None


def for_elsewhere(cell: "Cell") -> tuple[str, str, str]:
    """Make a cell's folder for the machine that will run it; returns what `run_cell_elsewhere` takes there."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    cell.state = "waiting"
    return cell.experiment.toml(), str(cell.folder), str(Path.cwd())


def run_cell_elsewhere(settings: str, folder: str, home: str, tell: Callable[[Message], Any]) -> Message:
    """Run a cell on a machine of a cluster; relative paths start at the folder where the sweep was started."""
    if Path(home).is_dir():
        os.chdir(home)
    if not Path(folder).is_dir():  # the sweep has created it
        host = socket.gethostname()
        return "failed", f"{host} does not see {folder}: put --output on storage that all machines share", None
    return run_cell(settings, tell)


def release_memory() -> None:
    """Return the memory of a finished cell to the system.

    The C library keeps blocks that are free but lie between others, more with each cell: 3 GB after nine cells of
    EfficientNet-Lite0, of which a run uses 0.6 GB.
    """
    from fedsim.runs.workspace import close_workspaces

    close_workspaces()
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc has it
        trim(0)


def serve_cells(connection: Connection, gpus: tuple[str, ...], variables: Mapping[str, str]) -> None:
    """Receive settings, run them and report progress, until None or the signal END arrives.

    variables: the sweep's environment
    """
    logging.getLogger("fedsim").addFilter(Once())
    signal.signal(END, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also where a library of the run unblocks it
    os.environ.clear()
    os.environ.update(variables)
    gc.freeze()  # what all workers share is no garbage; each search among it would take a tenth of a second
    threading.Thread(target=die_with_parent, daemon=True).start()
    if gpus:  # early enough: the variable is read when CUDA is first used
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        while (settings := connection.recv()) is not None:
            connection.send(run_cell(settings, connection.send))
    except (EOFError, OSError):
        return


def end(number: int, frame: object) -> None:
    """End this process at once, together with the Ray processes of its cell.

    It does not raise an exception, because a library that calls our code might print the exception and continue.
    """
    try:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
    finally:
        os._exit(128 + number)


def die_with_parent() -> None:
    """End this process at once when the process of the sweep has ended, even in the middle of a round.

    A new sweep may continue this run, so this process must write nothing more.
    """
    parent = parent_process()
    assert parent is not None  # a cell has a process of its own
    wait([parent.sentinel])
    os._exit(ORPHANED)
