"""A federation that has one fault after the other (faults.py)."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from harness import SITE, Loopback, run_folder
from outcomes import STOP, check_equal, finished
from processes import until


class Lane(Loopback):
    """A federation that has one fault after the other; its victim is connected by a cable that can be cut."""

    number = 0

    def __init__(self, folder: Path, timeout: float) -> None:
        super().__init__(folder, target=False, nginx=True)
        self.timeout = timeout
        self.connect_by_cable(SITE)

    def fresh(self) -> Path:
        self.number += 1
        return self.folder / f"out{self.number}"

    def begin(self, output: Path, method: str = "fedavg", **settings: object) -> subprocess.Popen:
        """Start a run. The patience is 0, so that a lost reply has an effect (not in attacks.py)."""
        own = {"train.rounds": 3, "run.timeout": self.timeout, "run.evaluate_target": "server", "run.patience": 0}
        return super().begin(output, method, **{**own, **settings})

    def begin_and_slow(self, output: Path, seconds: float, **settings: object) -> subprocess.Popen:
        """Start a run; the victim is now training in round 2 and takes that long."""
        started = self.break_site("slow", seconds=seconds)
        process = self.begin(output, **settings)
        until(lambda: not started.exists(), 400, "round 2")
        return process

    def again(self, output: Path, method: str = "fedavg", **settings: object) -> str:
        """The same command, which completes an interrupted run."""
        finished(self.begin(output, method, **STOP, **settings))
        return f"the same command: exit 0, {check_equal(run_folder(output, method), method)}"


Fault = Callable[[Lane], str]
