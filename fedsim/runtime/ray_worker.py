"""A worker of clients on a Ray cluster, as the driver sees it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Error, Message

from fedsim.common.errors import CLIENT_APP_RAISED
from fedsim.common.workers import Worker, WorkerDiedError
from fedsim.runtime.cluster import import_ray
from fedsim.runtime.message_bytes import with_arrays
from fedsim.runtime.ray_actor import Order, Want
from fedsim.tensors.records import Config, configs_of

START_SECONDS = 60.0  # a new worker that has not started after this time has no room


def ready(workers: Iterable[Any], seconds: float | None) -> list[Any]:
    """Return a worker whose `call` of Ray is over, if there is one; waits for it at most `seconds` (None: no limit)."""
    by_call = {worker.call: worker for worker in workers if worker.call is not None}
    if not by_call:
        return []
    calls, _ = import_ray().wait(list(by_call), num_returns=1, timeout=seconds)
    return [by_call[call] for call in calls]


@dataclass(eq=False)
class PackedMessage:
    """A message that waits for its reply: whole, and without its tensors but with references to them.

    The references are to objects in Ray's object store.
    """

    message: Message
    small: Message
    records: dict[str, tuple[Any, list[str] | None]]


class ClientWorker(Worker[PackedMessage, Message]):
    """A Ray actor that runs the client app for its clients; its tasks are their messages.

    new_actor: starts an actor for contexts
    contexts: the clients' contexts by node
    hand_over: called with this worker when no machine has room for it any more; another one then adopts its clients
    """

    repeats = True
    most = None

    def __init__(
        self,
        new_actor: Callable[[dict[int, Context]], Any],
        contexts: dict[int, Context],
        hand_over: Callable[["ClientWorker"], None],
    ) -> None:
        super().__init__()
        self.ray = import_ray()
        self._new_actor, self.contexts, self._hand_over = new_actor, contexts, hand_over
        self.actor: Any = None
        self.call: Any = None  # in which the actor answers the messages that it has

    @property
    def is_running(self) -> bool:
        return self.actor is not None

    def start(self) -> None:
        self.actor = self._new_actor(self.contexts)

    def send(self, tasks: Sequence[PackedMessage]) -> None:
        """Send the tasks in one call, unless the worker is working; the call answers some of them."""
        if self.call is not None:
            return
        references: list[Any] = []
        orders: list[Order] = []
        for task in tasks:
            wants: list[Want] = []
            for name, (reference, names) in task.records.items():
                if reference not in references:
                    references.append(reference)
                wants.append((name, references.index(reference), names))
            orders.append((task.small, wants))
        self.call = self.actor.answer.remote(orders, *references)
        self.sent = len(tasks)

    def results(self) -> list[Message]:
        call, self.call = self.call, None
        try:
            answered = self.ray.get(call)
        except self.ray.exceptions.RayTaskError as error:  # not from the app, whose exceptions become error replies
            self.sent = 0
            return [failed(self.tasks[0], str(error))]
        except self.ray.exceptions.RayError as error:
            is_started = not getattr(error, "actor_init_failed", False)
            what = "died twice (out of memory?)" if is_started else "could not start"
            raise WorkerDiedError(f"{what}: {essence(error)}") from error
        self.sent = 0  # those without an answer are sent again
        return [with_arrays(reply, records) for reply, records in answered]

    def failure(self, task: PackedMessage, cause: str) -> Message:
        return failed(task, f"the worker of {addressee(task.message)} {cause}")

    def replace(self) -> None:
        """Start actors until one lives; one that Ray places on a machine that is already gone dies at once."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.start()
            birth = self.actor.pid.remote()
            try:
                self.ray.get(birth, timeout=max(0.0, deadline - time.monotonic()))
                return
            except self.ray.exceptions.GetTimeoutError:
                self._hand_over(self)
                return
            except self.ray.exceptions.RayError as error:
                if getattr(error, "actor_init_failed", False):
                    return  # its next call says why
            self.release(0.0)
            time.sleep(1.0)

    def adopt(self, other: "ClientWorker") -> None:
        """Take over the clients and tasks of another worker, which is ended."""
        other.release(0.0)
        self.actor.adopt.remote(other.contexts)
        self.contexts |= other.contexts
        self.tasks += other.tasks
        other.tasks.clear()
        self.send_next()

    def release(self, deadline: float) -> None:
        """Kill the actor at once: it keeps nothing that is not in the state folder."""
        if self.actor is not None and self.ray.is_initialized():
            self.ray.kill(self.actor)
        self.actor = self.call = None


def failed(task: PackedMessage, reason: str) -> Message:
    """Return the error reply to a task's message."""
    return Message(Error(CLIENT_APP_RAISED, reason), reply_to=task.message)


def addressee(message: Message) -> str:
    """Return a text that names the receiver of a message."""
    config: Config = dict(configs_of(message.content).get("config", {}))
    return f"client {config['client']!r}" if config.get("client") else f"node {message.metadata.dst_node_id}"


def essence(error: Exception) -> str:
    """Return one line of a Ray error: the last (the exception) when a worker could not start, otherwise the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if getattr(error, "actor_init_failed", False) else lines[0]
