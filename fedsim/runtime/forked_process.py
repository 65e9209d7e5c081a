"""One of the processes of `fedsim.runtime.forked`: how it gets messages, what it does with them, how it is replaced."""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp import ClientApp

from fedsim.common.errors import CLIENT_APP_RAISED, UserError
from fedsim.runtime.parcel import Kept, answer, bytes_of, parcel, select, standing, unpack, written
from fedsim.tensors.arrays import keep_views

FITS = 2**16  # bytes that a pipe holds for a process that does not read
KEPT = 4  # records of tensors that a process keeps
ATTEMPTS = 2  # at a message whose process dies
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent dies


class ForkedProcess:
    """One process and the messages of its clients.

    It has one of them at a time, and the next one when that is so small that it waits in the pipe: neither side then
    waits for the other to read. A model that several messages have in common is sent once.
    """

    def __init__(self, app: ClientApp, contexts: dict[int, Context], cores: Sequence[int]) -> None:
        self._app, self.contexts, self._cores = app, contexts, cores
        self._process: Any = None
        self.pipe: Connection | None = None
        self.waiting: deque[Message] = deque()
        self._sent = 0  # messages, the first of those that wait, which the process has
        self._attempts = 0  # at the first message
        self._kept: list[Kept] = []  # what both sides keep of the latest messages

    def start(self) -> None:
        """Fork the process; OSError when the machine has no more of them, or no memory."""
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        arguments = (theirs, self.pipe, self._app, self.contexts, self._cores, os.getpid())
        process = context.Process(target=answer_messages, args=arguments, daemon=True)
        with theirs:
            process.start()
        self._process = process

    @property
    def pid(self) -> int:
        """Its id; 0 before it is needed."""
        return 0 if self._process is None else self._process.pid or 0

    def _started(self) -> Connection:
        assert self.pipe is not None
        return self.pipe

    def end(self) -> None:
        """Kill the process, which keeps nothing that is not in the state folder; what waits is forgotten."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self.pipe is not None:
            self.pipe.close()
        self._process = self.pipe = None
        self._sent = self._attempts = 0
        self._kept = []
        self.waiting.clear()

    def send_next(self) -> None:
        """Send the messages that the process may have now; it is forked when it does not exist yet."""
        if self._process is None and self.waiting:
            try:
                self.start()
            except OSError as error:
                raise UserError(
                    f"a process for clients could not be forked ({error}); the same command continues the run, and "
                    "with run.processes = 1 it needs no other process"
                ) from error
        while self._sent < min(len(self.waiting), 2):
            letter, kept = self._letter(self.waiting[self._sent])
            if self._sent and len(letter) > FITS:
                return
            self._sent += 1
            self._kept = kept
            try:
                self._started().send_bytes(letter)
            except OSError:  # the process is dead: `receive` finds the end of the pipe
                return

    def _letter(self, message: Message) -> tuple[memoryview, list[Kept]]:
        """The message with the tensors that the process does not keep, and what it keeps from then on."""
        kept = list(self._kept)

        def write(record: ArrayRecord) -> tuple:
            place = standing(record, kept)
            if place is not None:
                return known, (place, list(record))
            if len(kept) == KEPT:
                kept.clear()
            kept.append(bytes_of(record))
            return fresh, (len(kept) - 1, *parcel(record)[1])

        return written(message, write), kept

    def receive(self) -> Message | None:
        """The reply to the first message; None when the process has died and its successor repeats the message."""
        try:
            reply = pickle.loads(self._started().recv_bytes())
        except (EOFError, OSError):
            return self._replace()
        self.waiting.popleft()
        self._sent -= 1
        self._attempts = 0
        return reply

    def _replace(self) -> Message | None:
        attempts, waiting = self._attempts + 1, list(self.waiting)
        self._process.join()
        code = self._process.exitcode
        self.end()
        self.waiting.extend(waiting)
        if attempts < ATTEMPTS:
            self._attempts = attempts
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
    # A process that wakes up shall not take the core of its parent, for which the other processes wait.
    with contextlib.suppress(OSError):  # some containers do not have this, and do without
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        pipe.send_bytes(written(answer(app, message, contexts)))


_kept: list[ArrayRecord] = []  # in a forked process: the array records of the latest messages


def fresh(place: int, heads: Sequence, buffers: Sequence) -> ArrayRecord:
    """In a forked process: an array record that is sent with the message; it takes the last place among the kept."""
    record = unpack(heads, buffers)
    keep_views(record)
    _kept[place:] = [record]
    return record


def known(place: int, names: Sequence[str]) -> ArrayRecord:
    """In a forked process: tensors of an array record that came with an earlier message."""
    return select(_kept[place], names)
