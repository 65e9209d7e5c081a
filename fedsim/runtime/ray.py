"""The Ray runtime: every virtual client has a fixed worker, and a worker that dies is replaced.

Client k belongs to worker k mod n, which keeps its data, model and personal state in memory. Workers run in parallel;
the clients of one worker run one after the other. When a worker has died, a new one processes the messages without an
answer again. Where no machine has room for a new one, because a machine is gone, another worker takes the clients over.
Personal state is read from the run's state folder, which all machines of a cluster must be able to read.
"""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message

from fedsim.common.errors import CLIENT_APP_RAISED
from fedsim.runtime.cluster import import_ray, open_cluster, plan_workers
from fedsim.runtime.inline import LocalGrid
from fedsim.runtime.parcel import Kept, Parcel, bytes_of, joined, select, standing, without_arrays
from fedsim.runtime.ray_worker import Want, Worker, WorkerSetup
from fedsim.settings import RunSettings
from fedsim.tensors.arrays import nbytes
from fedsim.tensors.records import Config, arrays_of, configs_of

CLIENT_APP = "fedsim.client_app:app"
# The driver's folders of data, for workers on machines that do not name folders of their own.
FORWARDED = ("FEDSIM_DATA", "FEDSIM_CACHE", "FEDSIM_PLUGINS")

SMALL_BYTES = 2**19  # smaller records are sent faster without the object store
WINDOW = 256  # so many messages of a phase, or more, may be sent before the first reply is there
PER_WORKER = 4
START_SECONDS = 60.0  # a new worker that has not started after this time has no room


@dataclass
class PackedMessage:
    """A message that waits for its reply: whole, and without its tensors but with references to them.

    The references are to objects in Ray's object store.
    """

    message: Message
    small: Message
    records: dict[str, tuple[Any, list[str] | None]]


@dataclass
class WorkerHandle:
    """What the driver knows of one worker: its clients' contexts, its actor, its unanswered jobs and the running call.

    After a worker has died, `careful` is set: jobs are then sent one at a time, so that it is known which job kills a
    worker.
    """

    contexts: dict[int, Context]
    actor: Any = None
    jobs: list[PackedMessage] = field(default_factory=list)
    call: Any = None
    careful: bool = False


class Shelf:
    """The models in the object store. A model is stored once, for all messages that contain it."""

    def __init__(self) -> None:
        self._kept: list[tuple[Kept, Any]] = []

    def place(self, record: ArrayRecord) -> tuple[Any, list[str] | None]:
        """(reference to an object with the record's tensors, names of the tensors that the message has; None: all).

        Training after an evaluation sends the same bytes again, perhaps with fewer tensors; they are not stored twice.
        A small record is not stored: it is sent with the call, and is returned instead of a reference.
        """
        position = standing(record, [kept for kept, _ in self._kept])
        if position is not None:
            kept, reference = self._kept[position]
            return reference, None if len(kept) == len(record) else list(record)
        record = select(record, list(record))  # the guard may put other tensors into the record, in place
        parcel = Parcel(record)
        reference = parcel if nbytes(record) < SMALL_BYTES else import_ray().put(parcel)
        self._kept.append((bytes_of(record), reference))
        return reference, None

    def forget_all_but(self, used: Iterable[Any]) -> None:
        """Release the objects that the latest messages do not use, so that the object store can free their memory."""
        used = set(used)
        self._kept = [(kept, reference) for kept, reference in self._kept if reference in used]


class RayGrid(LocalGrid):
    """Flower's Grid over virtual clients on Ray workers, local or on the cluster at `run.ray_address`."""

    def __init__(self, nodes: int, run: RunSettings, app: str = CLIENT_APP) -> None:
        super().__init__(nodes)
        self._ray = import_ray()
        self._own_cluster = open_cluster(run)
        self._shelf = Shelf()
        self._handles: list[WorkerHandle] = []
        try:
            plan = plan_workers(run, nodes)
            variables = {name: os.environ[name] for name in FORWARDED if os.environ.get(name)}
            self._setup = WorkerSetup(app, run.threads, str(Path.cwd()), variables)
            self._actor = self._ray.remote(Worker).options(
                num_cpus=plan.cpus, num_gpus=plan.gpus, max_restarts=0, scheduling_strategy="SPREAD"
            )
            for index in range(plan.workers):
                contexts = {node: self.contexts[node] for node in self.node_ids[index :: plan.workers]}
                self._handles.append(WorkerHandle(contexts))
                self._hire(self._handles[-1])
        except BaseException:
            self.close()
            raise
        self._handle_of = {node: handle for handle in self._handles for node in handle.contexts}

    def workers(self) -> list[tuple[int, list[int]]]:
        """Process id and node ids of every worker."""
        pids = self._ray.get([handle.actor.pid.remote() for handle in self._handles])
        return [(pid, list(handle.contexts)) for pid, handle in zip(pids, self._handles)]

    # --- Flower's Grid --------------------------------------------------------------------------------------------

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages to their workers, which start at once; returns the ids."""
        messages = list(self._stamped(messages))
        for message in messages:
            self._handle_of[message.metadata.dst_node_id].jobs.append(self._pack(message))
        for handle in self._handles:
            self._submit(handle)
        jobs = [job for handle in self._handles for job in handle.jobs]
        self._shelf.forget_all_but(reference for job in jobs for reference, _ in job.records.values())
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that have arrived since the last call."""
        self._gather(0.0)
        return super().pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send messages and yield the replies as they arrive; only a limited number of messages is without a reply.

        Replies that are not there after `timeout` seconds are left out. A late worker is replaced, so that it does not
        go on with its work during the next rounds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        source, most = iter(messages), max(WINDOW, PER_WORKER * len(self._handles))
        waiting: list[str] = []
        while True:
            fresh = list(islice(source, most - len(waiting)))
            waiting += self.push_messages(fresh) if fresh else []
            if not waiting:
                break
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._replace_late()
                break
            self._gather(left)
            for reply in super().pull_messages(waiting):
                waiting.remove(reply.metadata.reply_to_message_id)
                yield reply
                del reply

    def close(self) -> None:
        """Stop the workers, and Ray when this grid started it or connected to it."""
        for handle in self._handles:
            self._dismiss(handle)
        self._handles, self._shelf = [], Shelf()
        if self._own_cluster:
            self._ray.shutdown()

    # --- sending --------------------------------------------------------------------------------------------------

    def _pack(self, message: Message) -> PackedMessage:
        """The job of a message, whose tensors are put into the object store."""
        records = {name: self._shelf.place(record) for name, record in arrays_of(message.content).items()}
        return PackedMessage(message, without_arrays(message), records)

    def _submit(self, handle: WorkerHandle) -> None:
        """Send all jobs of a worker, or only the next one, unless it is working; the call answers some of them."""
        if handle.call is not None or not handle.jobs:
            return
        references: list[Any] = []
        orders = []
        for job in handle.jobs[: 1 if handle.careful else None]:
            wants: list[Want] = []
            for name, (reference, names) in job.records.items():
                if reference not in references:
                    references.append(reference)
                wants.append((name, references.index(reference), names))
            orders.append((job.small, wants))
        handle.call = handle.actor.answer.remote(orders, *references)

    def _hire(self, handle: WorkerHandle) -> None:
        handle.actor = self._actor.remote(self._setup, handle.contexts)

    def _dismiss(self, handle: WorkerHandle) -> None:
        if handle.actor is not None and self._ray.is_initialized():
            self._ray.kill(handle.actor)
        handle.actor = None

    # --- receiving ------------------------------------------------------------------------------------------------

    def _gather(self, timeout: float | None) -> None:
        """Collect the replies that have arrived; waits at most `timeout` seconds (None: no limit) for the first."""
        handles = {handle.call: handle for handle in self._handles if handle.call is not None}
        if not handles:
            return
        ready, _ = self._ray.wait(list(handles), num_returns=1, timeout=timeout)
        for call in ready:
            self._take(handles[call])

    def _take(self, handle: WorkerHandle) -> None:
        """Collect a worker's replies, or replace the worker when it has died; then send its next jobs."""
        try:
            answered = self._ray.get(handle.call)
        except self._ray.exceptions.RayTaskError as error:  # not from the app, whose exceptions become error replies
            self._fail_first(handle, str(error))
        except self._ray.exceptions.RayError as error:
            self._replace(handle, error)
        else:
            for job, (reply, parcels) in zip(list(handle.jobs), answered):
                self._answer(handle, job, joined(reply, parcels))
        handle.call = None
        handle.careful = handle.careful and bool(handle.jobs)
        self._submit(handle)

    def _answer(self, handle: WorkerHandle, job: PackedMessage, reply: Message) -> None:
        self._replies[job.message.metadata.message_id] = reply
        handle.jobs.remove(job)

    def _fail_first(self, handle: WorkerHandle, reason: str) -> None:
        job = handle.jobs[0]
        self._answer(handle, job, Message(Error(CLIENT_APP_RAISED, reason), reply_to=job.message))

    def _replace(self, handle: WorkerHandle, error: Exception) -> None:
        """Replace a worker that has died. The new one gets its jobs one by one, to know which one kills."""
        self._dismiss(handle)
        if handle.careful:
            who = addressee(handle.jobs[0].message)
            started = not getattr(error, "actor_init_failed", False)
            what = "died twice (out of memory?)" if started else "could not start"
            self._fail_first(handle, f"the worker of {who} {what}: {essence(error)}")
        handle.careful = True
        others = [other for other in self._handles if other is not handle]
        if not self._started(handle) and others:
            self._hand_over(handle, min(others, key=lambda other: len(other.contexts)))

    def _started(self, handle: WorkerHandle) -> bool:
        """Hire a worker until one starts; one that Ray places on a machine that is already gone dies at once."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self._hire(handle)
            birth = handle.actor.pid.remote()
            try:
                self._ray.get(birth, timeout=max(0.0, deadline - time.monotonic()))
                return True
            except self._ray.exceptions.GetTimeoutError:
                return False
            except self._ray.exceptions.RayError as error:
                if getattr(error, "actor_init_failed", False):
                    return True  # its next call says why
            self._dismiss(handle)
            time.sleep(1.0)

    def _hand_over(self, handle: WorkerHandle, heir: WorkerHandle) -> None:
        """Give a worker's clients and messages to another worker, for the rest of the run."""
        self._dismiss(handle)
        self._handles.remove(handle)
        heir.actor.adopt.remote(handle.contexts)
        heir.contexts |= handle.contexts
        heir.jobs += handle.jobs
        handle.jobs = []
        self._handle_of |= dict.fromkeys(handle.contexts, heir)
        self._submit(heir)

    def _replace_late(self) -> None:
        for handle in self._handles:
            if handle.jobs:
                handle.jobs.clear()
                handle.call, handle.careful = None, False
                self._dismiss(handle)
                self._hire(handle)


def addressee(message: Message) -> str:
    """A text that names the receiver of a message."""
    config: Config = dict(configs_of(message.content).get("config", {}))
    return f"client {config['client']!r}" if config.get("client") else f"node {message.metadata.dst_node_id}"


def essence(error: Exception) -> str:
    """One line of a Ray error: the last line (the exception) when a worker could not start, otherwise the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if getattr(error, "actor_init_failed", False) else lines[0]
