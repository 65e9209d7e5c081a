"""The inline runtime in several processes of this machine, which are forked when that saves time.

Each process has a share of the cores for itself. It is a copy of this one: it has the data and networks that are loaded
here, so that its start takes some milliseconds. Personal state lies in the run's state folder, where another process
finds it, since any of them may serve any client. The numbers of a run do not depend on the processes, except for noise
that hides a model or an update: it is drawn anew each time, and differs from run to run anyway.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

from fedsim.common.cores import free_cores
from fedsim.common.errors import UserError
from fedsim.common.workers import ready, stop
from fedsim.records.callbacks import RunCallback
from fedsim.runs.plan import Plan
from fedsim.runs.processes import reason_of_machine, reason_of_settings
from fedsim.runtime.forked_process import ForkedProcess
from fedsim.runtime.inline import InlineGrid
from fedsim.settings import RunSettings

logger = logging.getLogger("fedsim")

LEAST_SAVED = 2.0  # seconds that several processes must save in the whole run
AHEAD = 4  # messages for each process that are made before a process can take them


class ForkedGrid(InlineGrid, RunCallback):
    """Runs the client app in this process, or in processes forked from it, of which each takes the next client when it
    has none.

    As a callback of its run it sees how long the clients of the first round trained. By default it forks as many
    processes as cores are free when that saves at least LEAST_SAVED seconds, and says so in the log. `run.processes`
    sets the number. Several processes need run.threads = 1, Linux, and a machine on which PyTorch sees no accelerator.
    """

    def __init__(self, app: ClientApp, plan: Plan, nodes: int, say: Callable[[str], None] = logger.info) -> None:
        super().__init__(app, nodes)
        self._plan, self._say = plan, say
        self._processes: list[ForkedProcess] = []
        self._served: dict[int, ForkedProcess] = {}  # the process that has had the latest message of a node
        run, wanted = plan.experiment.run, plan.experiment.run.processes
        self._limited = wanted > 1 and run.timeout != RunSettings().timeout
        self._undecided = wanted == 0
        if wanted > 1:
            self._divide(min(wanted, nodes))

    # --- the run's callback ---------------------------------------------------------------------------------------

    def on_round(self, row: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Decide after the first round in which clients trained."""
        if not self._undecided or not row["steps"]:
            return
        self._undecided = False
        count = min(free_cores(), len(self.node_ids))
        rounds = self._plan.experiment.train.rounds - row["round"]
        saved = rounds * row["train_seconds"] * (1 - 1 / count)
        if count == 1 or saved < LEAST_SAVED or reason_of_settings(self._plan.experiment):
            return
        if reason := reason_of_machine() or self._fork(count):
            self._say(f"clients go on in one process: {reason} (run.processes = 1: do not try)")
            return
        self._say(
            f"clients train in {count} processes from now on, with a core for each: training took "
            f"{row['train_seconds']:.1f} s of round {row['round']}, and {rounds} rounds remain "
            "(run.processes = 1: one process)"
        )

    def pids(self) -> list[int]:
        """Ids of the processes; 0 for one that was not needed yet."""
        return [process.pid for process in self._processes]

    def nodes_of_processes(self) -> list[int]:
        """Return as many nodes as processes: of so many messages each process gets one."""
        return self.node_ids[: len(self._processes)]

    def run_callbacks(self) -> list[RunCallback]:
        """This grid: it decides after the first round."""
        return [self]

    def _fork(self, count: int) -> str:
        """Fork all processes; why this failed, which leaves the clients with this process."""
        self._divide(count)
        try:
            for process in self._processes:
                process.start()
        except UserError as error:
            self.close()
            self._processes = []
            return f"another could not be forked ({error.__cause__})"
        return ""

    def _divide(self, count: int) -> None:
        """Make the processes, which are forked when they are needed, and give each its cores."""
        cores = sorted(os.sched_getaffinity(0))
        self._processes = [
            ForkedProcess(self._app, self.contexts, cores[index::count] or cores) for index in range(count)
        ]

    # --- Flower's Grid --------------------------------------------------------------------------------------------

    def deliver(self, messages: list[Message]) -> Iterable[Message]:
        """Replies of the clients, one per message, in order."""
        if not self._processes:
            return super().deliver(messages)
        replies = {reply.metadata.reply_to_message_id: reply for reply in self._exchange(iter(messages))}
        return [replies[message.metadata.message_id] for message in messages]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Deliver messages, few ahead of their replies, and pass on the replies as they come.

        Processes that are not done after a `run.timeout` that was set are ended; others take their place when needed.
        """
        if not self._processes:
            yield from super().send_and_receive(messages, timeout=timeout)
            return
        yield from self._exchange(self._stamped(messages), timeout if self._limited else None)

    def _exchange(self, source: Iterator[Message], seconds: float | None = None) -> Iterator[Message]:
        made: list[Message] = []  # that no process has yet
        most = AHEAD * len(self._processes)
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while True:
                made += islice(source, max(most - len(made), 0))
                self._hand_out(made)
                busy = [process for process in self._processes if process.tasks]
                if not busy:
                    return
                readable = ready(busy, None if deadline is None else max(deadline - time.monotonic(), 0.0))
                if not readable:
                    return
                for process in readable:
                    answered = process.receive()
                    self._hand_out(made)  # before the reply is checked
                    while answered:
                        yield answered.pop(0)[1]
        finally:
            for process in self._processes:
                if process.tasks:  # nobody listens any more
                    process.give_up()

    def _hand_out(self, made: list[Message]) -> None:
        """Give messages to the processes: one to each that has none, and a second one while many are left.

        A process gets its own clients first, whose data it has read, and any other rather than nothing.
        """
        for has, is_own in itertools.product((0, 1), (True, False)):
            for process in self._processes:
                if len(process.tasks) != has or len(made) <= 2 * has * len(self._processes):
                    continue
                nodes = [message.metadata.dst_node_id for message in made]
                places = [place for place, node in enumerate(nodes) if not is_own or self._served.get(node) is process]
                if places:
                    self._served[nodes[places[0]]] = process
                    process.give(made.pop(places[0]))

    def close(self) -> None:
        """End the processes."""
        stop(self._processes)
