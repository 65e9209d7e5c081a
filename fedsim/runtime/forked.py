"""The inline runtime in several processes of this machine, which are forked when that saves time.

Each process has a share of the cores for itself. It is a copy of this one: it has the data and networks that are loaded
here, so that its start takes some milliseconds. Personal state lies in the run's state folder, where another process
finds it, since any of them may serve any client. The numbers of a run do not depend on the processes, except for noise
that hides a model or an update: it is drawn anew each time, and differs from run to run anyway.
"""

import contextlib
import ctypes
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp import ClientApp

from fedsim.common.cores import free_cores
from fedsim.common.errors import CLIENT_APP_RAISED, UserError
from fedsim.common.workers import ProcessWorker, ready, stop
from fedsim.records.callbacks import RunCallback
from fedsim.runs.plan import Plan
from fedsim.runs.processes import reason_of_machine, reason_of_settings
from fedsim.runtime.local_grid import InlineGrid
from fedsim.runtime.message_bytes import (
    TensorBytes,
    answer,
    message_bytes,
    position_among,
    reduced,
    select,
    tensor_bytes,
    unpack,
)
from fedsim.settings import RunSettings
from fedsim.tensors.arrays import keep_views

logger = logging.getLogger("fedsim")

LEAST_SAVED = 2.0  # seconds that several processes must save in the whole run
AHEAD = 4  # messages for each process that are made before a process can take them
FITS = 2**16  # bytes that a pipe holds for a process that does not read
MOST_SHARED = 4  # records of tensors that a process keeps
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent dies


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


class ForkedProcess(ProcessWorker[Message, Message]):
    """A process that was forked from this one; its tasks are the messages of clients.

    It answers one of them at a time, and has the next one when that is so small that it waits in the pipe: neither side
    then waits for the other to read. A model that several messages have in common is sent once.
    """

    repeats = True
    most = 2

    def __init__(self, app: ClientApp, contexts: dict[int, Context], cores: Sequence[int]) -> None:
        super().__init__()
        self._app, self.contexts, self._cores = app, contexts, cores
        self._shared: list[TensorBytes] = []  # what both sides keep of the latest messages

    @property
    def pid(self) -> int:
        """Its id; 0 before it is needed."""
        return 0 if self.process is None else self.process.pid or 0

    def new_process(self, ours: Connection, theirs: Connection) -> BaseProcess:
        context = multiprocessing.get_context("fork")
        arguments = (theirs, ours, self._app, self.contexts, self._cores, os.getpid())
        return context.Process(target=answer_messages, args=arguments, daemon=True)

    def start(self) -> None:
        """Fork the process; UserError when the machine has no more of them, or no memory."""
        try:
            super().start()
        except OSError as error:
            raise UserError(
                f"a process for clients could not be forked ({error}); the same command continues the run, and "
                "with run.processes = 1 it needs no other process"
            ) from error

    def send(self, tasks: Sequence[Message]) -> None:
        _, pipe = self.link
        while self.sent < len(tasks):
            content, shared = self._content(tasks[self.sent])
            if self.sent and len(content) > FITS:
                return
            self.sent += 1
            self._shared = shared
            try:
                pipe.send_bytes(content)
            except OSError:  # the process is dead: `results` finds the end of the pipe
                return

    def _content(self, message: Message) -> tuple[memoryview, list[TensorBytes]]:
        """The message with the tensors that the process does not keep, and what it keeps from then on."""
        shared = list(self._shared)

        def reduce(record: ArrayRecord) -> tuple:
            place = position_among(record, shared)
            if place is not None:
                return shared_tensors, (place, list(record))
            if len(shared) == MOST_SHARED:
                shared.clear()
            shared.append(tensor_bytes(record))
            return new_tensors, (len(shared) - 1, *reduced(record)[1])

        return message_bytes(message, reduce), shared

    def results(self) -> list[Message]:
        return [self.message()]

    def suspects(self) -> int:
        return 1  # the next message was still in the pipe

    @staticmethod
    def cause(code: int | None) -> str:
        return f"exit code {code}; out of memory?"

    def failure(self, task: Message, cause: str) -> Message:
        return Message(Error(CLIENT_APP_RAISED, f"the process of its client died 2 times ({cause})"), reply_to=task)

    def ask_to_end(self) -> None:
        """Kill it: it keeps nothing that is not in the state folder."""
        self.link[0].kill()

    def release(self, deadline: float) -> None:
        super().release(deadline)
        self._shared = []


def answer_messages(
    pipe: Connection,
    end: Connection,
    app: ClientApp,
    contexts: dict[int, Context],
    cores: Sequence[int],
    parent: int,
) -> None:
    """Do the work of a forked process: answer messages until the parent closes the pipe or dies."""
    end.close()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a progress bar may have taken their place, with its locks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent too, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.sched_setaffinity(0, cores)
    # A process that wakes up shall not take the core of its parent, for which the other processes wait.
    with contextlib.suppress(OSError):  # some containers do not have this, and do without
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        pipe.send_bytes(message_bytes(answer(app, message, contexts)))


_shared: list[ArrayRecord] = []  # in a forked process: the array records of the latest messages


def new_tensors(place: int, heads: Sequence, buffers: Sequence) -> ArrayRecord:
    """Return, in a forked process, an array record that came with the message; it is kept, and those after `place`
    are forgotten."""
    record = unpack(heads, buffers)
    keep_views(record)
    _shared[place:] = [record]
    return record


def shared_tensors(place: int, names: Sequence[str]) -> ArrayRecord:
    """Return, in a forked process, tensors of an array record that came with an earlier message."""
    return select(_shared[place], names)
