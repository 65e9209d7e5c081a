"""Writes the progress of a deployed run into the server's kit, for `fedsim deploy status`, and one line per reply."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from fedsim.common.files import atomic_write
from fedsim.deploy.audit import AUDIT, Audit
from fedsim.deploy.federation import read_federation
from fedsim.deploy.status import PROGRESS
from fedsim.settings.experiment import Experiment

RUN = "deployment.json"  # in a run's folder: Flower's id of the run, and the federation


def note_run(folder: Path, run_id: str, federation: str) -> None:
    """Writes which run of a federation the folder has, by which a repeated command finds it."""
    atomic_write(folder / RUN, json.dumps({"run": run_id, "federation": federation}) + "\n", durable=True)


class Progress:
    """A run's callback: `run/progress.json` after every round, and `state/audit.jsonl` of the server's kit.

    It notes the run's id, too, because the command that has submitted the run may have ended before it could.
    """

    def __init__(self, federation: str, run_id: str) -> None:
        described = read_federation(federation)
        self.kit = described.kit("server")
        self.federation = described.name
        self.run_id = run_id
        self.audit = Audit(self.kit / AUDIT)
        self.progress: dict[str, Any] = {}

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Notes that the run has started or continues."""
        note_run(folder, self.run_id, self.federation)
        run = experiment.run
        name = f"{experiment.method_name} on {experiment.data.dataset}, target {run.target}, seed {run.seed}"
        self.progress = {"name": name, "folder": str(folder), "rounds": experiment.train.rounds, "round": 0}
        self._write("running")
        self.audit.write("run", name=name, folder=str(folder))

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Notes each client's reply: its size, how far it moved the model, and what became of it."""
        statuses = [{"client": client.get("client"), "status": client.get("status")} for client in clients]
        self.progress |= {"round": row["round"], "clients": statuses}
        self._write("running")
        for client in clients:
            self.audit.write(
                "reply",
                round=row["round"],
                client=client["client"],
                bytes=client.get("bytes_up", 0),
                norm=client.get("update_norm"),
                verdict=client.get("status", ""),
            )

    def on_end(self, summary: dict) -> None:
        """Notes that the run is finished."""
        self._write("finished")

    def on_failure(self, error: BaseException) -> None:
        """Notes that the run has stopped."""
        self._write("stopped")
        self.audit.write("stopped", reason=str(error))

    def _write(self, state: str) -> None:
        content = {**self.progress, "state": state, "time": time.time()}
        with contextlib.suppress(OSError):  # a full disk makes `fedsim deploy status` old, and does not end the run
            atomic_write(self.kit / PROGRESS, json.dumps(content))
