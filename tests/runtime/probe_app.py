"""A client app for tests of the Ray runtime: it says where it runs, and can sleep, raise an exception or die."""

import os
import signal
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

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
