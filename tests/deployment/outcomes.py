"""What a deployed run left, compared with the same run in one process; and the results of trials."""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from flwr.app import Error, Message
from harness import SMALL, TARGET, VICTIM
from safetensors.numpy import load_file
from support import run_small

from fedsim.runs.plan import complete
from fedsim.settings.experiment import read_experiment

COMPARED = ["round", "train_loss", "mean_validation_accuracy", "mean_validation_loss", "target_accuracy", "target_loss"]
TOLERANCE = 1e-5
STOP, CONTINUE = {"run.on_client_failure": "stop"}, {"run.on_client_failure": "continue"}


class WrongError(Exception):
    """A result is not the one that is required."""


def need(condition: object, text: str) -> None:
    """Raise WrongError with the text unless the condition holds."""
    if not condition:
        raise WrongError(text)


def finished(process: subprocess.Popen, code: int = 0) -> str:
    """Wait for the end of a run; its last words."""
    _, said = process.communicate(timeout=1500)
    need(process.returncode == code and "Traceback (" not in said[:10], f"exit {process.returncode}: {said[-400:]}")
    return said


def options(text: str, **defaults: object) -> argparse.Namespace:
    """The options of a script, by these names and of the kinds of these values."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def trial(name: str, work: Callable[[], str]) -> bool:
    """Print a row: what happened, seconds, and whether it is what must happen; returns that."""
    begin, holds = time.monotonic(), True
    try:
        happened = work()
    except Exception as error:
        happened, holds = f"{type(error).__name__}: {error}", False
    said = " ".join(happened.split())[:300].replace("|", "/")
    print(f"| {name} | {said} | {time.monotonic() - begin:.0f} | {'yes' if holds else 'NO'} |", flush=True)
    return holds


def statuses(folder: Path) -> pd.Series:
    """The status of every client and round according to clients.csv."""
    return pd.read_csv(folder / "clients.csv").set_index(["round", "client"])["status"]


def status(folder: Path) -> str:
    """That of the victim in round 2."""
    return str(statuses(folder)[2, VICTIM])


def last_line(said: str) -> str:
    return (said.strip().splitlines() or [""])[-1]


def lost_replies(folder: Path) -> set[tuple[int, str, str]]:
    """The replies (round, phase, client) that are missing according to clients.csv."""
    clients = pd.read_csv(folder / "clients.csv")
    clients = clients[(clients["round"] > 0) & (clients["client"] != TARGET)]
    lost = {"train": clients["weight"].isna(), "evaluate": clients["validation_accuracy"].isna()}
    return {(row.round, phase, row.client) for phase, where in lost.items() for row in clients[where].itertuples()}


def reference(output: Path, method: str, absent: set[tuple[int, str, str]], **settings: object) -> Path:
    """Do the same run inline, without the replies that were lost; returns its folder."""

    def lose(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        lost = (config["round"], message.metadata.message_type, config["client"]) in absent
        return Message(Error(2, "lost"), reply_to=message) if lost else reply

    words = {**SMALL, "train.rounds": 3, **CONTINUE, "run.output": output, **settings}
    given = [f"method.name={method}", *(f"{key}={value}" for key, value in words.items())]
    return run_small(complete(read_experiment("digits", given)), tamper=lose)[0]


def difference(folder: Path, method: str = "fedavg", **settings: object) -> float:
    """The largest one in accuracies, losses and last model from an inline run without the replies that were lost."""
    with tempfile.TemporaryDirectory() as other:
        same = reference(Path(other), method, lost_replies(folder), **settings)
        ours, theirs = (pd.read_csv(each / "rounds.csv")[COMPARED].to_numpy(float) for each in (folder, same))
        need(ours.shape == theirs.shape, f"{len(ours)} rows")
        need((np.isnan(ours) == np.isnan(theirs)).all(), "cells are missing")
        models = [load_file(each / "last.safetensors") for each in (folder, same)]
    furthest = [np.nanmax(np.abs(ours - theirs))]
    furthest += [np.abs(models[0][name] - value).max() for name, value in models[1].items() if value.size]
    return float(max(furthest))


def check_equal(folder: Path, method: str = "fedavg", reduced: bool = False) -> str:
    """Compare a run with that of the complete or the reduced federation; the returned text says which."""
    lost = lost_replies(folder)
    need(bool(lost) == reduced, f"replies lost: {sorted(lost)}")
    need(difference(folder, method) <= TOLERANCE, "the numbers are others")
    where = "" if not lost else f" without {', '.join(f'{phase} {round_}' for round_, phase, _ in sorted(lost))}"
    return f"equal to the {'reduced' if reduced else 'unbroken'} federation{where}"
