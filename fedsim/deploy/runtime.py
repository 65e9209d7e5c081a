"""A run on the machines of a federation: submit it to the operator's SuperLink, show its records, return its folder.

The SuperLink and the server app run on this machine. As long as the server app runs, it holds the lock of the run's
folder (`claim`). The same command can therefore follow a run that is still running, and continue one that has stopped.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedsim.common.errors import USER_ERROR, ClientFailedError, UserError
from fedsim.deploy.bundles import RUN as RUN_APP
from fedsim.deploy.control import Control
from fedsim.deploy.federation import CONNECTION, read_federation
from fedsim.deploy.progress import RUN, note_run
from fedsim.records.callbacks import RunCallback
from fedsim.records.record_files import is_finished, read_record
from fedsim.runs import admission
from fedsim.runs.claim import is_abandoned, is_claimed
from fedsim.runs.log_lines import LOG
from fedsim.runs.longer import reopen
from fedsim.runs.plan import Plan
from fedsim.settings.experiment import Experiment

POLL_SECONDS = 0.5
STATUS_SECONDS = 15.0  # between two questions to the SuperLink while no server app holds the folder
NO_SIGN = "No heartbeat received"  # Flower's detail of a run whose server app did not answer
# At most, from Flower's status "running" until the server app holds the folder, or from its release until the end.
PATIENCE_SECONDS = 150.0
DEAD_SECONDS = 10.0  # at most, until the run ends, after a holder that died; Flower says "running" for a minute
START_SECONDS = 300.0  # at most, from the submission of a run until its server app holds the folder
SILENCE_SECONDS = 60.0  # at most, without an answer of the SuperLink, which may be restarting


def run_deployed(plan: Plan, callbacks: Sequence[RunCallback] = ()) -> Path:
    """Runs one experiment on a federation, or follows or continues its run; returns the run's folder.

    Raises UserError for what a user can correct, and ClientFailedError with the reason when the run failed. Ctrl-C
    stops the run.
    """
    federation = read_federation(plan.experiment.run.federation)
    plan = admission.plan_for_sites(plan, federation.clients)
    experiment, folder = plan.experiment, plan.folder
    control = Control(federation)
    control.online()
    reopen(folder)  # a finished run that goes on would be told as finished
    run_id = running(control, folder) or submit(control, experiment, folder)
    try:
        follow(control, run_id, experiment, folder, callbacks)
    except KeyboardInterrupt:
        stop(control, run_id, folder)
        raise
    return folder


def submit(control: Control, experiment: Experiment, folder: Path) -> str:
    """Submits the run; returns its id, which is also written into its folder.

    Raises ClientFailedError when Flower refuses it.
    """
    with tempfile.TemporaryDirectory(prefix="fedsim-submit-") as name:
        answer = control.submit(Path(name), RUN_APP, {"experiment": experiment.toml()})
    if "run-id" not in answer:
        raise ClientFailedError(f"Flower refused the run: {answer.get('error-message', answer)}")
    run_id = str(answer["run-id"])
    note_run(folder, run_id, control.federation.name)
    return run_id


def running(control: Control, folder: Path) -> str:
    """Returns the id of the folder's run when it is running, otherwise an empty text.

    A run without its server app is stopped.
    """
    file = folder / RUN
    if not file.is_file():
        return ""
    run_id = str(json.loads(file.read_text())["run"])
    deadline = time.monotonic() + STATUS_SECONDS
    while not is_claimed(folder):
        state, _ = status(control, run_id)
        if state.startswith(("finished", "unknown")):
            return ""
        if time.monotonic() > deadline:  # the server app has died; Flower will notice it later
            control.flwr("stop", run_id, CONNECTION)
            return ""
        time.sleep(POLL_SECONDS)
    return run_id


def status(control: Control, run_id: str) -> tuple[str, str]:
    """Returns (status, details) of a run.

    The status is "silent" when the SuperLink does not answer, and "unknown" when it has no such run.
    """
    answer = control.flwr("list", CONNECTION, "--run-id", run_id)
    if "runs" not in answer:
        message = str(answer.get("error-message", ""))
        state = "unknown" if "not found" in message.lower() else "silent"
        return state, str(answer.get("error-message", answer))
    rows = answer["runs"]
    if not rows:
        return "unknown", ""
    return str(rows[0]["status"]), str(rows[0].get("status-details", ""))


def follow(
    control: Control,
    run_id: str,
    experiment: Experiment,
    folder: Path,
    callbacks: Sequence[RunCallback],
) -> None:
    """Gives new records to the callbacks until the run has ended.

    Raises ClientFailedError or UserError when it failed.
    """
    for callback in callbacks:
        callback.on_start(experiment, folder)
    rounds = new_rounds(folder)
    notes = new_notes(folder)
    asked = began = time.monotonic()
    started = False
    while not is_finished(folder):
        tell(callbacks, next(rounds), next(notes))
        time.sleep(POLL_SECONDS)
        if is_claimed(folder):
            started = True
            asked = time.monotonic() - STATUS_SECONDS  # so that the status is asked as soon as the folder is released
        elif time.monotonic() - asked >= STATUS_SECONDS:
            asked = time.monotonic()
            has_died = started and is_abandoned(folder)
            patience = DEAD_SECONDS if has_died else PATIENCE_SECONDS
            if verdict(control, run_id, folder, patience):
                break
            if not started and asked - began > START_SECONDS:
                control.flwr("stop", run_id, CONNECTION)
                kit = control.federation.kit("server")
                raise ClientFailedError(
                    f"run {run_id} has not started within {START_SECONDS:g} s; call stop.sh and start.sh in {kit}, "
                    "then repeat this command"
                )
    tell(callbacks, next(rounds), next(notes))
    summary = read_record(folder / "summary.csv").iloc[0].to_dict()
    for callback in callbacks:
        callback.on_end(summary)


def verdict(control: Control, run_id: str, folder: Path, patience: float) -> bool:
    """Whether the run has completed; False while it is running. Raises ClientFailedError or UserError when it failed.

    A run has failed when no process holds its folder for `patience` seconds, even if Flower says that it is running.
    """
    deadline = time.monotonic() + patience
    silent = time.monotonic() + SILENCE_SECONDS
    while True:
        state, details = status(control, run_id)
        if is_finished(folder):
            return True
        if state != "silent":
            silent = time.monotonic() + SILENCE_SECONDS
        if is_claimed(folder) or state in ("pending", "starting"):
            return False
        if state.startswith("finished") or state == "unknown":
            raise failure(state, details)
        if time.monotonic() > silent:
            start = control.federation.kit("server") / "start.sh"
            raise ClientFailedError(f"the SuperLink does not answer any more; call {start}, then repeat this command")
        if time.monotonic() > deadline:
            control.flwr("stop", run_id, CONNECTION)
            raise ClientFailedError(
                f"the server app of run {run_id} has died (its status is {state}, but no process holds {folder}): "
                "the same command continues the run; the SuperLink's log may show the reason"
            )
        time.sleep(2.0)


def failure(state: str, details: str) -> Exception:
    """Returns the error of a run that did not complete: a UserError for what a user can correct."""
    if USER_ERROR in details:
        return UserError(details.split(USER_ERROR, 1)[1].strip())
    reason = details.removeprefix("ServerApp failed with exception: ")
    if NO_SIGN in reason:
        reason += (
            ": the server app gave no sign for a minute, because it was stopped or its machine was too busy; the same "
            "command continues the run"
        )
    if state == "unknown":
        reason = (
            f"the SuperLink does not know this run ({reason or 'it lists none'}): its state is older than the run, or "
            "was removed; the same command submits the run anew, which goes on from its last checkpoint"
        )
    return ClientFailedError(reason or f"the run ended as {state}; see the SuperLink's log")


def stop(control: Control, run_id: str, folder: Path) -> None:
    """Stops a run and waits until its server app has released the folder."""
    control.flwr("stop", run_id, CONNECTION)
    deadline = time.monotonic() + SILENCE_SECONDS
    while is_claimed(folder) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def tell(callbacks: Sequence[RunCallback], rows: list[dict[str, Any]], notes: list[str]) -> None:
    """Gives the rows of rounds to all callbacks, and the notes to those that have a method `note`."""
    for callback in callbacks:
        for row in rows:
            callback.on_round(row, [])
        if hasattr(callback, "note"):
            for note in notes:
                callback.note(note)


def new_rounds(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows that were added to rounds.csv since the previous call of `next`."""
    file = folder / "rounds.csv"
    last_round = -1
    size = -1
    while True:
        rows: list[dict[str, Any]] = []
        if file.is_file() and file.stat().st_size != size:
            size = file.stat().st_size
            table = read_record(file)  # the server app may be writing a row
            if not table.empty:
                table = table[table["round"] > last_round].astype(object)
            rows = table.where(table.notna(), None).to_dict("records")
            for row in rows:
                last_round = max(last_round, int(row["round"]))
        yield rows


def new_notes(folder: Path) -> Iterator[list[str]]:
    """Yields the warnings and errors that were added to run.log since the previous call of `next`; none from before."""
    file = folder / LOG
    place = file.stat().st_size if file.is_file() else 0
    while True:
        notes: list[str] = []
        if file.is_file():
            with file.open(encoding="utf-8", errors="replace") as stream:
                stream.seek(place)
                text = stream.read()
            lines = text[: text.rfind("\n") + 1]  # the last line may not be written to its end
            place += len(lines.encode())
            for line in lines.splitlines():
                _, level, note = line.partition(" WARNING ")
                if level:
                    notes.append(note)
        yield notes
