"""The inline runtime in several processes of this machine, which are forked when that saves time.

Client k belongs to process k mod n, which has a share of the cores for itself. A process is a copy of this one: it has
the data and networks that are loaded here, so that its start takes some milliseconds. Personal state lies in the run's
state folder, where a process that replaces a dead one finds it. The numbers of a run do not depend on the processes.
"""

import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsim.cores import free_cores
from fedsim.errors import CLIENT_APP_RAISED, UserError
from fedsim.experiment import Experiment
from fedsim.run.plan import Plan
from fedsim.run.workspace import pick_device
from fedsim.runtime.identity import stamp, with_content
from fedsim.runtime.inline import InlineGrid
from fedsim.runtime.parcel import Parcel, without_arrays

logger = logging.getLogger("fedsim")

LEAST_SAVED = 2.0  # seconds that several processes must save in the whole run
AHEAD = 4  # messages for each process that are made before their replies are there
ATTEMPTS = 2  # at a message whose process dies
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent dies


class ForkedProcess:
    """One process and the messages of its clients; it has at most one of them at a time."""

    def __init__(self, app: ClientApp, contexts: dict[int, Context], cores: Sequence[int]) -> None:
        self._app, self._contexts, self._cores = app, contexts, cores
        self._process: Any = None
        self.pipe: Connection | None = None
        self.waiting: deque[Message] = deque()
        self.attempts = 0  # at the first message, which is with the process when this is not zero

    def start(self) -> None:
        """Fork the process."""
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        arguments = (theirs, self.pipe, self._app, self._contexts, self._cores, os.getpid())
        self._process = context.Process(target=answer_messages, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its id; 0 before it is needed."""
        return 0 if self._process is None else self._process.pid

    def end(self) -> None:
        """Kill the process, which keeps nothing that is not in the state folder; what waits is forgotten."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.pipe.close()
        self._process = self.pipe = None
        self.attempts = 0
        self.waiting.clear()

    def send_next(self) -> None:
        """Send the first message that waits, if the process has none; a process that has ended is replaced."""
        if self.attempts or not self.waiting:
            return
        self.attempts += 1
        if self._process is None:
            self.start()
        self._send(self.waiting[0])

    def _send(self, message: Message) -> None:
        parcels = {name: Parcel(record) for name, record in message.content.array_records.items()}
        try:
            self.pipe.send_bytes(pickle.dumps((without_arrays(message), parcels), protocol=5))
        except OSError:  # the process is dead: `receive` finds the end of the pipe
            return

    def receive(self) -> Message | None:
        """The reply to the first message; None when the process has died and its successor repeats the message."""
        try:
            reply, parcels = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return self._replace()
        self.waiting.popleft()
        self.attempts = 0
        return with_content(reply, RecordDict({**parcels, **reply.content})) if parcels else reply

    def _replace(self) -> Message | None:
        attempts, waiting = self.attempts, list(self.waiting)
        self._process.join()
        code = self._process.exitcode
        self.end()
        self.waiting.extend(waiting)
        self.start()
        if attempts < ATTEMPTS:
            self.attempts = attempts + 1
            self._send(self.waiting[0])
            return None
        reason = f"the process of its client died {attempts} times (exit code {code}; out of memory?)"
        return Message(Error(CLIENT_APP_RAISED, reason), reply_to=self.waiting.popleft())


def answer_messages(
    pipe: Connection,
    end: Connection,
    app: ClientApp,
    contexts: dict[int, Context],
    cores: Sequence[int],
    parent: int,
) -> None:
    """What a forked process does: answer messages until the parent closes the pipe or dies."""
    end.close()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a progress bar may have taken their place, with its locks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent too, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    while True:
        try:
            message, parcels = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        message = with_content(message, RecordDict({**parcels, **message.content}))
        try:
            reply = app(message, contexts[message.metadata.dst_node_id])
        except Exception:
            reply = Message(Error(CLIENT_APP_RAISED, traceback.format_exc()), reply_to=message)
        parcels = {} if reply.has_error() else reply.content.array_records
        parcels = {name: Parcel(record) for name, record in parcels.items()}
        pipe.send_bytes(pickle.dumps((without_arrays(reply) if parcels else reply, parcels), protocol=5))


class ForkedGrid(InlineGrid):
    """Runs the client app in this process, or in processes forked from it, of which each serves its own clients.

    As a callback of its run it sees how long the clients of the first round trained: by default it forks as many
    processes as cores are free when that saves at least LEAST_SAVED seconds, and says so in the log. `run.processes`
    sets the number. Several processes need run.threads = 1, the CPU and Linux.
    """

    def __init__(self, app: ClientApp, plan: Plan, nodes: int, say: Callable[[str], None] = logger.info) -> None:
        super().__init__(app, nodes)
        self._plan, self._say = plan, say
        self._processes: list[ForkedProcess] = []
        self._process_of: dict[int, ForkedProcess] = {}
        wanted = plan.experiment.run.processes
        self._undecided = wanted == 0
        if wanted > 1:
            if reason := reason_against(plan.experiment):
                raise UserError(f"run.processes = {wanted}: {reason}")
            self._divide(min(wanted, nodes))

    # --- the run's callback ---------------------------------------------------------------------------------------

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Nothing is known yet."""

    def on_round(self, row: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Decide after the first round in which clients trained."""
        if not self._undecided or not row["steps"]:
            return
        self._undecided = False
        count = min(free_cores(), len(self.node_ids))
        rounds = self._plan.experiment.train.rounds - row["round"]
        saved = rounds * row["train_seconds"] * (1 - 1 / count)
        if count > 1 and saved >= LEAST_SAVED and not reason_against(self._plan.experiment):
            self._say(
                f"clients train in {count} processes from now on, with a core for each: training took "
                f"{row['train_seconds']:.1f} s of round {row['round']}, and {rounds} rounds remain "
                "(run.processes = 1: one process)"
            )
            self._divide(count)

    def on_end(self, summary: dict[str, Any]) -> None:
        """Nothing."""

    def pids(self) -> list[int]:
        """Ids of the processes; 0 for one that was not needed yet."""
        return [process.pid for process in self._processes]

    def _divide(self, count: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        for index in range(count):
            contexts = {node: self.contexts[node] for node in self.node_ids[index::count]}
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
        """Deliver messages, few ahead of their replies, and pass on the replies as they come."""
        if not self._processes:
            yield from super().send_and_receive(messages, timeout=timeout)
            return
        yield from self._exchange(self._stamped(messages))

    def _stamped(self, messages: Iterable[Message]) -> Iterator[Message]:
        for message in messages:
            stamp(message, f"m{next(self._ids)}")
            yield message

    def _exchange(self, source: Iterator[Message]) -> Iterator[Message]:
        open_messages, most = 0, AHEAD * len(self._processes)
        try:
            while True:
                while open_messages < most and (message := next(source, None)) is not None:
                    process = self._process_of[message.metadata.dst_node_id]
                    process.waiting.append(message)
                    process.send_next()
                    open_messages += 1
                if not open_messages:
                    return
                busy = {process.pipe: process for process in self._processes if process.waiting}
                for pipe in wait(list(busy)):
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


def reason_against(experiment: Experiment) -> str:
    """Why clients of this run cannot train in forked processes; "" when they can."""
    if sys.platform != "linux":
        return "processes are forked on Linux only"
    if pick_device(experiment.run.device).type != "cpu":
        return "clients share one GPU in one process; use run.runtime = ray, or train.side_by_side"
    if experiment.run.threads != 1:
        return "several processes have one thread each; set run.threads = 1"
    if experiment.train.compile != "off":
        return "train.compile compiles for one process"
    if threading.current_thread() is not threading.main_thread():
        return "processes are forked from the main thread only"  # they would end with the thread that forked them
    return ""
