"""The inline runtime in several processes of this machine, which are forked when that saves time.

Each process has its own clients and a share of the cores for itself. It is a copy of this one: it has the data and
networks that are loaded here, so that its start takes some milliseconds. Personal state lies in the run's state folder,
where a process that replaces a dead one finds it. The numbers of a run do not depend on the processes, except for noise
that hides a model or an update: it is drawn anew each time, and differs from run to run anyway.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

from fedsim.common.cores import free_cores
from fedsim.common.values import Foreign
from fedsim.data import domain_of
from fedsim.flower.identity import stamp
from fedsim.results.callbacks import RunCallback
from fedsim.run.plan import Plan
from fedsim.run.processes import reason_of_machine, reason_of_settings
from fedsim.runtime.forked_process import ForkedProcess
from fedsim.runtime.inline import InlineGrid
from fedsim.settings import RunSettings

logger = logging.getLogger("fedsim")

LEAST_SAVED = 2.0  # seconds that several processes must save in the whole run
AHEAD = 4  # messages for each process that are made before their replies are there


class ForkedGrid(InlineGrid, RunCallback):
    """Runs the client app in this process, or in processes forked from it, of which each serves its own clients.

    As a callback of its run it sees how long the clients of the first round trained. By default it forks as many
    processes as cores are free when that saves at least LEAST_SAVED seconds, and says so in the log. `run.processes`
    sets the number. Several processes need run.threads = 1, Linux, and a machine on which PyTorch sees no accelerator.
    """

    def __init__(self, app: ClientApp, plan: Plan, nodes: int, say: Callable[[str], None] = logger.info) -> None:
        super().__init__(app, nodes)
        self._plan, self._say = plan, say
        self._processes: list[ForkedProcess] = []
        self._process_of: dict[int, ForkedProcess] = {}
        run, wanted = plan.experiment.run, plan.experiment.run.processes
        self._limited = wanted > 1 and run.timeout != RunSettings().timeout
        self._undecided = wanted == 0
        if wanted > 1:
            self._divide(min(wanted, nodes), [])

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
        if reason := reason_of_machine() or self._fork(count, clients):
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

    def lanes(self) -> list[int]:
        """One node of each process, by which the process can be asked for more than its clients' work."""
        return [next(iter(process.contexts)) for process in self._processes]

    def _fork(self, count: int, clients: Sequence[dict[str, Any]]) -> str:
        """Divide the clients and fork all processes; why this failed, which leaves the clients with this process."""
        self._divide(count, clients)
        try:
            for process in self._processes:
                process.start()
        except OSError as error:
            self.close()
            self._processes, self._process_of = [], {}
            return f"another could not be forked ({error})"
        return ""

    def _divide(self, count: int, clients: Sequence[dict[str, Any]]) -> None:
        """Give each process its nodes, so that all have the same work if a round is like that of these rows."""
        cores, nodes = sorted(os.sched_getaffinity(0)), self.node_ids
        seconds = expected_seconds(self._plan.clients, clients)
        work = [sum(seconds[place :: len(nodes)]) for place in range(len(nodes))]
        for index, places in enumerate(shares(work, count)):
            contexts = {nodes[place]: self.contexts[nodes[place]] for place in places}
            process = ForkedProcess(self._app, contexts, cores[index::count] or cores)
            self._processes.append(process)
            self._process_of |= dict.fromkeys(contexts, process)

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

    def _stamped(self, messages: Iterable[Message]) -> Iterator[Message]:
        for message in messages:
            stamp(message, f"m{next(self._ids)}")
            yield message

    def _exchange(self, source: Iterator[Message], seconds: float | None = None) -> Iterator[Message]:
        open_messages, most = 0, AHEAD * len(self._processes)
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while True:
                while open_messages < most and (message := next(source, None)) is not None:
                    process = self._process_of[message.metadata.dst_node_id]
                    process.waiting.append(message)
                    process.send_next()
                    open_messages += 1
                if not open_messages:
                    return
                busy: dict[Foreign, ForkedProcess] = {
                    process.pipe: process for process in self._processes if process.waiting
                }
                ready = wait(list(busy), None if deadline is None else max(deadline - time.monotonic(), 0.0))
                if not ready:
                    return
                for pipe in ready:
                    reply = busy[pipe].receive()
                    busy[pipe].send_next()
                    if reply is not None:
                        open_messages -= 1
                        yield reply
                        del reply
        finally:
            for process in self._processes:
                if process.waiting:  # nobody listens any more
                    process.end()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()


def expected_seconds(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[float]:
    """How long each client will train: as in its row of a round, or as the mean of its domain where the domain has one.

    A client without either was not drawn, or it failed, and counts as the mean of the others.
    """
    seconds = {row["client"]: row["train_seconds"] / row.get("clients", 1) for row in rows if row.get("train_seconds")}
    mean = sum(seconds.values()) / max(len(seconds), 1)
    return [seconds.get(name, seconds.get(f"{domain_of(name)}/*", mean)) for name in names]


def shares(work: Sequence[float], count: int) -> list[list[int]]:
    """The places of the work that each of `count` processes gets: the longest first, each to the one with the least.

    This is done for a few neighbours at a time, because messages are made in the order of the clients, and few of them
    ahead of their replies: no process may have to wait for a message behind many of the others'. Places with equal work
    take turns.
    """
    found: list[list[int]] = [[] for _ in range(count)]
    sums, together = [0.0] * count, AHEAD * count
    for start in range(0, len(work), together):
        window = range(start, min(start + together, len(work)))
        for place in sorted(window, key=lambda place: -work[place]):
            least = min(range(count), key=lambda index: (sums[index], len(found[index])))
            found[least].append(place)
            sums[least] += work[place]
    return [sorted(places) for places in found]
