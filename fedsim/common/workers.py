"""A worker: how it gets tasks, how it is tried again when it dies, and how it is ended.

How a worker is reached is the matter of its subclasses. A forked process and a Ray actor serve the clients of a run
(`fedsim.runtime`). A process of the fork server, a Ray task and a Slurm job run cells of sweeps (`fedsim.studies`).
"""

import multiprocessing
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

STOP_SECONDS = 10.0  # until workers that were asked to end are killed, for all of them together

Task = TypeVar("Task")
Result = TypeVar("Result")
AnyProcess = TypeVar("AnyProcess", bound="ProcessWorker")


class WorkerDiedError(Exception):
    """A worker has died. The text says how, as the end of a sentence about its task."""


class Worker(ABC, Generic[Task, Result]):
    """One worker, which does its tasks in their order, and is started when it has one.

    A worker that dies is replaced. Where `repeats` is set, the new one gets the tasks again. Those that may have killed
    the old one it gets one at a time, so that a task with which it dies, too, is the one to blame. That task gets
    `failure` as its result; without `repeats` it gets it after the first death.

    most: the number of tasks that the worker has at the same time; None: all
    """

    repeats = False
    most: int | None = 1

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()  # those without a result
        self.sent = 0  # how many of them, the first, the worker has
        self._suspects = 0  # how many of them, the first, may have killed a worker

    # --- what its user calls --------------------------------------------------------------------------------------

    def give(self, task: Task) -> None:
        """Add a task, and send it if the worker may have it now."""
        self.tasks.append(task)
        self.send_next()

    def send_next(self) -> None:
        """Send the tasks that the worker may have now; it is started when it does not run."""
        if not self.tasks:
            return
        if not self.is_running:
            self._leave(time.monotonic())
            self.start()
        tasks = list(islice(self.tasks, 1 if self._suspects else self.most))
        if self.sent < len(tasks):
            self.send(tasks)

    def receive(self) -> list[tuple[Task, Result]]:
        """Receive what the worker has sent; returns the tasks that have ended with it, each with its result.

        The worker has its next tasks by then. The list is empty when a task has only told its progress, and when the
        worker has died and its tasks are done again.
        """
        try:
            results = self.results()
        except WorkerDiedError as error:
            return self._replaced(str(error))
        ended = [self._ended(result) for result in results]
        self.send_next()
        return ended

    def give_up(self) -> None:
        """End the worker and forget its tasks."""
        stop([self])
        self.tasks.clear()
        self._suspects = 0

    def _replaced(self, cause: str) -> list[tuple[Task, Result]]:
        suspects = self.suspects()
        self._leave(time.monotonic())
        ended = []
        if self.repeats and not self._suspects:
            self._suspects = suspects
        else:
            ended = [self._ended(self.failure(self.tasks[0], cause))]
        self.replace()
        self.send_next()
        return ended

    def _ended(self, result: Result) -> tuple[Task, Result]:
        self.sent = max(self.sent - 1, 0)
        self._suspects = max(self._suspects - 1, 0)
        return self.tasks.popleft(), result

    def _leave(self, deadline: float) -> None:
        self.release(deadline)
        self.sent = 0

    # --- how it is reached ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether it has been started, and has not been found dead."""

    def start(self) -> None:
        """Start it, without waiting for it. One that lives only for its task is started by `send`."""

    @abstractmethod
    def send(self, tasks: Sequence[Task]) -> None:
        """Send the tasks that it does not have yet, of which the first `sent` are there; sets `sent`."""

    @abstractmethod
    def results(self) -> Sequence[Result]:
        """Receive the results of the first tasks; none when a task tells its progress. Raises WorkerDiedError."""

    @abstractmethod
    def failure(self, task: Task, cause: str) -> Result:
        """The result of a task with which the worker died. `cause`: the text of the WorkerDiedError."""

    def suspects(self) -> int:
        """The number of tasks, of the first, that may have killed it."""
        return self.sent

    def replace(self) -> None:
        """Start another one after a death, where that must not wait until there is a task."""

    def ask_to_end(self) -> None:
        """Ask a running one to end, without waiting for it."""

    @abstractmethod
    def release(self, deadline: float) -> None:
        """Wait until it has ended, at most until this time of `time.monotonic`; then kill and forget it."""


def stop(workers: Iterable[Worker], seconds: float = STOP_SECONDS) -> None:
    """End workers, which keep their tasks; those that have not ended after `seconds` are killed."""
    running = [worker for worker in workers if worker.is_running]
    for worker in running:
        worker.ask_to_end()
    deadline = time.monotonic() + seconds
    for worker in running:
        worker._leave(deadline)


class ProcessWorker(Worker[Task, Result]):
    """A worker that is a process of this machine, at the other end of a pipe."""

    process: BaseProcess | None = None
    pipe: Connection | None = None

    @abstractmethod
    def new_process(self, ours: Connection, theirs: Connection) -> BaseProcess:
        """The process, which is not started yet. ours, theirs: the ends of the pipe of this process and of that one."""

    def start(self) -> None:
        """Start the process; OSError or EOFError when that is not possible."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = self.new_process(ours, theirs)
            process.start()
        self.process, self.pipe = process, ours

    @property
    def link(self) -> tuple[BaseProcess, Connection]:
        """The process that has been started, and the connection to it."""
        assert self.process is not None
        assert self.pipe is not None
        return self.process, self.pipe

    @property
    def is_running(self) -> bool:
        """Whether it runs, or has died with tasks, which `results` finds."""
        return self.process is not None and (self.sent > 0 or self.process.is_alive())

    def message(self) -> Any:
        """The next message from the process; WorkerDiedError with the exit code in words when it has died."""
        process, pipe = self.link
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process.join(STOP_SECONDS)
            raise WorkerDiedError(self.cause(process.exitcode)) from None

    @staticmethod
    def cause(code: int | None) -> str:
        """A text that explains an exit code. SIGKILL mostly comes from the kernel when memory runs out."""
        if code is None or code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"{name}, out of memory?" if name == "SIGKILL" else name

    def release(self, deadline: float) -> None:
        """Wait until the process has ended, at most until `deadline`; then kill it. The pipe is closed."""
        if self.process is None:
            return
        process, pipe = self.link
        process.join(max(deadline - time.monotonic(), 0.0))
        if process.is_alive():
            process.kill()
        process.join()
        pipe.close()
        self.process = self.pipe = None


def ready(workers: Iterable[AnyProcess], seconds: float | None) -> list[AnyProcess]:
    """Those of the running workers from which something has come, or which have died.

    Waits at most `seconds` (None: no limit) for the first.
    """
    by_pipe: dict[Any, AnyProcess] = {worker.link[1]: worker for worker in workers}
    return [by_pipe[pipe] for pipe in wait(list(by_pipe), seconds)]
