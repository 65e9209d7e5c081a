"""One of the processes of `fedsim.runtime.forked`: how it gets messages, and what it does with them."""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp import ClientApp

from fedsim.common.errors import CLIENT_APP_RAISED, UserError
from fedsim.common.workers import ProcessWorker
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
from fedsim.tensors.arrays import keep_views

FITS = 2**16  # bytes that a pipe holds for a process that does not read
MOST_SHARED = 4  # records of tensors that a process keeps
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent dies


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
