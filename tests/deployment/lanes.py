"""A federation that has one fault after the other, and the runs with which its runs are compared."""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from cable import Cable
from flwr.app import Error, Message
from harness import SMALL, TARGET, Loopback, until
from safetensors.numpy import load_file
from support import run_small

from fedsim.run.plan import complete
from fedsim.settings.experiment import read_experiment

VICTIM, SITE = "rot15", "site-rot15"
COMPARED = ["round", "train_loss", "mean_validation_accuracy", "mean_validation_loss", "target_accuracy", "target_loss"]
TOLERANCE = 1e-5
STOP, CONTINUE = {"run.on_client_failure": "stop"}, {"run.on_client_failure": "continue"}


@dataclass
class Lane:
    """A federation that has one fault after the other."""

    federation: Loopback
    cable: Cable
    timeout: float
    number: int = 0

    def fresh(self) -> Path:
        """A new output folder."""
        self.number += 1
        return self.federation.folder / f"out{self.number}"

    def settings(self, **more: object) -> dict:
        """The settings of every run here. The patience is 0, so that a lost reply has an effect (not in attacks.py)."""
        own = {"train.rounds": 3, "run.timeout": self.timeout, "run.evaluate_target": "server", "run.patience": 0}
        return {**own, **more}

    def break_site(self, kind: str, **more: object) -> Path:
        """Let the victim fail in round 2; the returned file is removed when the fault has happened."""
        file = self.federation.fault_file(SITE)
        file.write_text(json.dumps({"kind": kind, "round": 2, "once": True, "seconds": 0, **more}))
        return file

    def run(self, output: Path, method: str = "fedavg", **settings: object) -> subprocess.CompletedProcess:
        """Run the small experiment to its end."""
        return self.federation.run(output, method, **self.settings(**settings))

    def begin(self, output: Path, method: str = "fedavg", **settings: object) -> subprocess.Popen:
        """Start a run."""
        return subprocess.Popen(
            self.federation.command(output, method, **self.settings(**settings)),
            cwd=self.federation.folder,
            env=self.federation.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def begin_and_slow(self, output: Path, seconds: float, **settings: object) -> subprocess.Popen:
        """Start a run; the victim is now training in round 2 and takes that long."""
        started = self.break_site("slow", seconds=seconds)
        process = self.begin(output, **settings)
        until(lambda: not started.exists(), 400, "round 2")
        return process


@dataclass
class Outcome:
    """The result of a fault, as a text and whether it is the wanted one."""

    happened: str
    holds: bool


class WrongError(Exception):
    """A result is not the one that is required."""


def need(condition: object, text: str) -> None:
    """Raise WrongError with the text unless the condition holds."""
    if not condition:
        raise WrongError(text)


def reference(output: Path, method: str, absent: set[tuple[int, str, str]]) -> Path:
    """Do the same run inline, without the replies (round, phase, client) that were lost; returns its folder."""

    def lose(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        lost = (config["round"], message.metadata.message_type, config["client"]) in absent
        return Message(Error(2, "lost"), reply_to=message) if lost else reply

    words = {**SMALL, "train.rounds": 3, "run.on_client_failure": "continue", "run.output": output}
    experiment = read_experiment(
        "digits", [f"method.name={method}", *(f"{key}={value}" for key, value in words.items())]
    )
    return run_small(complete(experiment), tamper=lose)[0]


def lost_replies(folder: Path) -> set[tuple[int, str, str]]:
    """The replies that are missing according to clients.csv."""
    clients = pd.read_csv(folder / "clients.csv")
    clients = clients[(clients["round"] > 0) & (clients["client"] != TARGET)]
    lost = {"train": clients["weight"].isna(), "evaluate": clients["validation_accuracy"].isna()}
    return {(row.round, phase, row.client) for phase, where in lost.items() for row in clients[where].itertuples()}


def check_equal(lane: Lane, folder: Path, method: str = "fedavg", reduced: bool = False) -> str:
    """Compare a run with that of the complete or the reduced federation; the returned text says which."""
    lost = lost_replies(folder)
    need(bool(lost) == reduced, f"replies lost: {sorted(lost)}")
    with tempfile.TemporaryDirectory(dir=lane.federation.folder) as other:
        same = reference(Path(other), method, lost)
        ours, theirs = (pd.read_csv(each / "rounds.csv")[COMPARED] for each in (folder, same))
        pd.testing.assert_frame_equal(ours, theirs, rtol=0, atol=TOLERANCE)
        models = [load_file(each / "last.safetensors") for each in (folder, same)]
        for name, value in models[0].items():
            np.testing.assert_allclose(value, models[1][name], rtol=0, atol=TOLERANCE, err_msg=name)
    where = "" if not lost else f" without {', '.join(f'{phase} {round_}' for round_, phase, _ in sorted(lost))}"
    return f"equal to the {'reduced' if reduced else 'unbroken'} federation{where}"


def status(folder: Path, round_: int = 2, client: str = VICTIM) -> str:
    """The status of a client in a round according to clients.csv."""
    clients = pd.read_csv(folder / "clients.csv")
    return str(clients[(clients["round"] == round_) & (clients["client"] == client)].iloc[0]["status"])
