"""The Ray runtime: virtual clients that stick to workers, one copy of a round's model, workers that may die.

Client k lives on worker k mod n, which keeps its data, model and personal state warm. Workers run in parallel, the
clients of one worker in order. A dead worker is replaced; what it had not answered is repeated, and personal state
comes back from the files below the run's state folder (which all machines of a cluster must see).
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict

from fedsim.arrays import nbytes
from fedsim.runtime.cluster import import_ray, open_cluster, plan_workers
from fedsim.runtime.identity import stamp, with_content
from fedsim.runtime.inline import LocalGrid
from fedsim.runtime.worker import CLIENT_APP_RAISED, Parcel, Place, Want, Worker, without_arrays
from fedsim.settings import RunSettings

CLIENT_APP = "fedsim.client_app:app"
# the driver's folders, for workers whose machine has none of its own
FORWARDED = ("FEDSIM_DATA", "FEDSIM_CACHE", "FEDSIM_PLUGINS")

SMALL_BYTES = 2**19  # below, a trip through the object store takes longer than the bytes themselves


@dataclass
class Job:
    """A message under way: itself without its tensors, and where the object store has them by record name."""

    message: Message
    small: Message
    records: dict[str, tuple[Any, list[str] | None]]


@dataclass
class Slot:
    """One worker's place: the contexts of its clients, its actor, its unanswered jobs in order and the call under way.

    Careful after a death, it sends one job at a time, so that a second death has one cause.
    """

    contexts: dict[int, Context]
    actor: Any = None
    jobs: list[Job] = field(default_factory=list)
    call: Any = None
    careful: bool = False


class Shelf:
    """The object store's side of the driver: every model lies there once, whichever messages and phases carry it."""

    def __init__(self) -> None:
        self._kept: list[tuple[ArrayRecord, Any]] = []

    def place(self, record: ArrayRecord) -> tuple[Any, list[str] | None]:
        """Reference to an object that holds the record's tensors, and which of them are meant (None: all).

        Training after an evaluation sends the same bytes again, perhaps fewer tensors: they are not put twice. A small
        record stands for itself and travels within the call.
        """
        for kept, reference in self._kept:
            if len(record) and all(name in kept and kept[name].data is array.data for name, array in record.items()):
                return reference, None if len(kept) == len(record) else list(record)
        parcel = Parcel(record)
        reference = parcel if nbytes(record) < SMALL_BYTES else import_ray().put(parcel)
        self._kept.append((record, reference))
        return reference, None

    def forget_all_but(self, used: Iterable[Any]) -> None:
        """Let go of what the messages just sent do not carry, so that the store can reuse its memory."""
        used = set(used)
        self._kept = [(record, reference) for record, reference in self._kept if reference in used]


class RayGrid(LocalGrid):
    """Flower's Grid over virtual clients on Ray workers, local or on the cluster at `run.ray_address`."""

    def __init__(self, nodes: int, run: RunSettings, app: str = CLIENT_APP) -> None:
        super().__init__(nodes)
        self._ray = import_ray()
        self._own_cluster = open_cluster(run)
        self._shelf = Shelf()
        self._slots: list[Slot] = []
        try:
            plan = plan_workers(run, nodes)
            variables = {name: os.environ[name] for name in FORWARDED if os.environ.get(name)}
            self._place = Place(app, run.threads, str(Path.cwd()), variables)
            self._actor = self._ray.remote(Worker).options(
                num_cpus=plan.cpus, num_gpus=plan.gpus, max_restarts=0, scheduling_strategy="SPREAD"
            )
            for index in range(plan.workers):
                contexts = {node: self.contexts[node] for node in self.node_ids[index :: plan.workers]}
                self._slots.append(Slot(contexts))
                self._hire(self._slots[-1])
        except BaseException:
            self.close()
            raise
        self._slot_of = {node: slot for slot in self._slots for node in slot.contexts}

    def workers(self) -> list[tuple[int, list[int]]]:
        """Process id and node ids of every worker."""
        pids = self._ray.get([slot.actor.pid.remote() for slot in self._slots])
        return [(pid, list(slot.contexts)) for pid, slot in zip(pids, self._slots)]

    # --- Flower's Grid --------------------------------------------------------------------------------------------

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages to their workers; their ids. Workers start at once."""
        messages = list(messages)
        for message in messages:
            stamp(message, f"m{next(self._ids)}")
            self._slot_of[message.metadata.dst_node_id].jobs.append(self._pack(message))
        for slot in self._slots:
            self._submit(slot)
        jobs = [job for slot in self._slots for job in slot.jobs]
        self._shelf.forget_all_but(reference for job in jobs for reference, _ in job.records.values())
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies that have arrived, each once."""
        self._gather(0.0)
        return super().pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and wait for their replies; those that come later than `timeout` seconds are missing.

        A worker that is late is replaced, so that it does not compute into the next rounds.
        """
        ids = self.push_messages(messages)
        deadline = None if timeout is None else time.monotonic() + timeout
        while any(slot.jobs for slot in self._slots):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._replace_late()
                break
            self._gather(left)
        return super().pull_messages(ids)

    def close(self) -> None:
        """Stop the workers, and Ray when this grid started it or connected to it."""
        for slot in self._slots:
            self._dismiss(slot)
        self._slots, self._shelf = [], Shelf()
        if self._own_cluster:
            self._ray.shutdown()

    # --- sending --------------------------------------------------------------------------------------------------

    def _pack(self, message: Message) -> Job:
        """The message apart from its tensors, which the object store holds."""
        records = {name: self._shelf.place(record) for name, record in message.content.array_records.items()}
        return Job(message, without_arrays(message), records)

    def _submit(self, slot: Slot) -> None:
        """Call the worker with its jobs (or the next one alone) unless it is at work; it answers some of them."""
        if slot.call is not None or not slot.jobs:
            return
        references: list[Any] = []
        orders = []
        for job in slot.jobs[: 1 if slot.careful else None]:
            wants: list[Want] = []
            for name, (reference, names) in job.records.items():
                if reference not in references:
                    references.append(reference)
                wants.append((name, references.index(reference), names))
            orders.append((job.small, wants))
        slot.call = slot.actor.answer.remote(orders, *references)

    def _hire(self, slot: Slot) -> None:
        slot.actor = self._actor.remote(self._place, slot.contexts)

    def _dismiss(self, slot: Slot) -> None:
        if slot.actor is not None and self._ray.is_initialized():
            self._ray.kill(slot.actor)
        slot.actor = None

    # --- receiving ------------------------------------------------------------------------------------------------

    def _gather(self, timeout: float | None) -> None:
        """Take what has arrived; waits at most `timeout` seconds (None: without end) for the first."""
        slots = {slot.call: slot for slot in self._slots if slot.call is not None}
        if not slots:
            return
        ready, _ = self._ray.wait(list(slots), num_returns=1, timeout=timeout)
        for call in ready:
            self._take(slots[call])

    def _take(self, slot: Slot) -> None:
        """The replies to a worker's first jobs, or another try when it is lost; then its other jobs."""
        try:
            answered = self._ray.get(slot.call)
        except self._ray.exceptions.RayTaskError as error:  # not the app: its exceptions come as error replies
            self._fail_first(slot, str(error))
        except self._ray.exceptions.RayError as error:
            self._replace(slot, error)
        else:
            for job, (reply, parcels) in zip(list(slot.jobs), answered):
                whole = with_content(reply, RecordDict({**parcels, **reply.content})) if parcels else reply
                self._answer(slot, job, whole)
        slot.call = None
        slot.careful = slot.careful and bool(slot.jobs)
        self._submit(slot)

    def _answer(self, slot: Slot, job: Job, reply: Message) -> None:
        self._replies[job.message.metadata.message_id] = reply
        slot.jobs.remove(job)

    def _fail_first(self, slot: Slot, reason: str) -> None:
        job = slot.jobs[0]
        self._answer(slot, job, Message(Error(CLIENT_APP_RAISED, reason), reply_to=job.message))

    def _replace(self, slot: Slot, error: Exception) -> None:
        """A new worker for a lost one, which repeats what was not answered, once and one by one.

        Who killed the first worker is uncertain: it had several jobs. The second dies of the one it has.
        """
        self._dismiss(slot)
        self._hire(slot)
        if slot.careful:
            who = addressee(slot.jobs[0].message)
            started = not getattr(error, "actor_init_failed", False)
            what = "died twice (out of memory?)" if started else "could not start"
            self._fail_first(slot, f"the worker of {who} {what}: {essence(error)}")
        slot.careful = True

    def _replace_late(self) -> None:
        for slot in self._slots:
            if slot.jobs:
                slot.jobs.clear()
                slot.call, slot.careful = None, False
                self._dismiss(slot)
                self._hire(slot)


def addressee(message: Message) -> str:
    """Who a message is for, in words."""
    config = message.content.config_records.get("config", {})
    return f"client {config['client']!r}" if config.get("client") else f"node {message.metadata.dst_node_id}"


def essence(error: Exception) -> str:
    """One line of a Ray error: the last of a worker that could not start (its exception), else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if getattr(error, "actor_init_failed", False) else lines[0]
