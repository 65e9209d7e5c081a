"""What Ray's processes import in tests: an app that says where it runs and can sleep, raise or die, and a callback."""

import os
import signal
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsim.records.callbacks import RunCallback

app = ClientApp()
answered = 0


@app.query()
def probe(message: Message, context: Context) -> Message:
    """Reply with the process id, the number of messages that the process has answered, and the received arrays."""
    global answered
    order, *words = message.content.config_records["config"]["order"].split(" ", 1)
    once = Path(words[0]) if words else None  # a file that marks the first time
    if order == "die" and not (once and once.exists()):
        if once:
            once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "raise":
        raise RuntimeError("told to raise")
    if order == "sleep":
        time.sleep(60)
    answered += 1
    where = ConfigRecord({"pid": os.getpid(), "answered": answered, "client": context.node_config["partition-id"]})
    return Message(RecordDict({"where": where, **message.content.array_records}), reply_to=message)


class DieOnce(RunCallback):
    """Sends SIGKILL to its own process in round 2 of the runs on rot15, but only the first time."""

    def on_start(self, experiment, folder):
        self.mark = folder.parent / "died" if experiment.run.target == "rot15" else None

    def on_round(self, row, clients):
        if self.mark and row["round"] == 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Killer(RunCallback):
    """Kills the first of a run's processes after round 1, as the kernel does when memory runs out."""

    def __init__(self, pids):
        self.pids, self.before = pids, []

    def on_round(self, row, clients):
        if row["round"] == 1:
            self.before = self.pids()
            os.kill(self.before[0], signal.SIGKILL)
