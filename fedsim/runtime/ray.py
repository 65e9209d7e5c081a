"""The Ray runtime: every virtual client has a fixed worker, and a worker that dies is replaced.

Client k belongs to worker k mod n, which keeps its data, model and personal state in memory. Workers run in parallel;
the clients of one worker run one after the other. When a worker has died, a new one processes the messages without an
answer again. Where no machine has room for a new one, because a machine is gone, another worker takes the clients over.
Personal state is read from the run's state folder, which all machines of a cluster must be able to read.
"""

import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message

from fedsim.common.workers import stop
from fedsim.runtime.cluster import import_ray, open_cluster, plan_workers
from fedsim.runtime.local_grid import LocalGrid
from fedsim.runtime.message_bytes import (
    RecordBytes,
    TensorBytes,
    position_among,
    select,
    tensor_bytes,
    without_arrays,
)
from fedsim.runtime.ray_actor import ClientActor, WorkerSetup
from fedsim.runtime.ray_worker import ClientWorker, PackedMessage, ready
from fedsim.settings import RunSettings
from fedsim.tensors.arrays import nbytes
from fedsim.tensors.records import arrays_of

CLIENT_APP = "fedsim.apps.client:app"
# The driver's folders of data, for workers on machines that do not name folders of their own.
FORWARDED = ("FEDSIM_DATA", "FEDSIM_CACHE", "FEDSIM_PLUGINS")

SMALL_BYTES = 2**19  # smaller records are sent faster without the object store
WINDOW = 256  # so many messages of a phase, or more, may be sent before the first reply is there
PER_WORKER = 4


class SharedTensors:
    """The models in the object store. A model is stored once, for all messages that contain it."""

    def __init__(self) -> None:
        self._stored: list[tuple[TensorBytes, Any]] = []

    def share(self, record: ArrayRecord) -> tuple[Any, list[str] | None]:
        """Return (reference to an object with the record's tensors, names of the message's tensors; None: all).

        Training after an evaluation sends the same bytes again, perhaps with fewer tensors; they are not stored twice.
        A small record is not stored: it is sent with the call, and is returned instead of a reference.
        """
        position = position_among(record, [tensors for tensors, _ in self._stored])
        if position is not None:
            tensors, reference = self._stored[position]
            return reference, None if len(tensors) == len(record) else list(record)
        record = select(record, list(record))  # the guard may put other tensors into the record, in place
        content = RecordBytes(record)
        reference = content if nbytes(record) < SMALL_BYTES else import_ray().put(content)
        self._stored.append((tensor_bytes(record), reference))
        return reference, None

    def release_all_but(self, used: Iterable[Any]) -> None:
        """Release the objects that the latest messages do not use, so that the object store can free their memory."""
        used = set(used)
        self._stored = [(tensors, reference) for tensors, reference in self._stored if reference in used]


class RayGrid(LocalGrid):
    """Flower's Grid over virtual clients on Ray workers, local or on the cluster at `run.ray_address`."""

    def __init__(self, nodes: int, run: RunSettings, app: str = CLIENT_APP) -> None:
        super().__init__(nodes)
        self._ray = import_ray()
        self._own_cluster = open_cluster(run)
        self._shared = SharedTensors()
        self._workers: list[ClientWorker] = []
        try:
            self._start_workers(nodes, run, app)
        except BaseException:
            self.close()
            raise
        self._worker_of = {node: worker for worker in self._workers for node in worker.contexts}

    def _start_workers(self, nodes: int, run: RunSettings, app: str) -> None:
        plan = plan_workers(run, nodes)
        variables = {name: os.environ[name] for name in FORWARDED if os.environ.get(name)}
        setup = WorkerSetup(app, run.threads, str(Path.cwd()), variables)
        actor = self._ray.remote(ClientActor).options(
            num_cpus=plan.cpus, num_gpus=plan.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        for index in range(plan.workers):
            contexts = {node: self.contexts[node] for node in self.node_ids[index :: plan.workers]}
            self._workers.append(ClientWorker(partial(actor.remote, setup), contexts, self._hand_over))
            self._workers[-1].start()

    def workers(self) -> list[tuple[int, list[int]]]:
        """Return the process id and the node ids of every worker."""
        pids = self._ray.get([worker.actor.pid.remote() for worker in self._workers])
        return [(pid, list(worker.contexts)) for pid, worker in zip(pids, self._workers)]

    # --- Flower's Grid --------------------------------------------------------------------------------------------

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages to their workers, which start at once; returns the ids."""
        messages = list(self._stamped(messages))
        for message in messages:
            self._worker_of[message.metadata.dst_node_id].tasks.append(self._packed(message))
        for worker in self._workers:
            worker.send_next()
        tasks = [task for worker in self._workers for task in worker.tasks]
        self._shared.release_all_but(reference for task in tasks for reference, _ in task.records.values())
        return [message.metadata.message_id for message in messages]

    def _packed(self, message: Message) -> PackedMessage:
        """The message as a worker's task; its tensors are put into the object store."""
        records = {name: self._shared.share(record) for name, record in arrays_of(message.content).items()}
        return PackedMessage(message, without_arrays(message), records)

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
        source, most = iter(messages), max(WINDOW, PER_WORKER * len(self._workers))
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

    def _gather(self, timeout: float | None) -> None:
        """Collect the replies that have arrived; waits at most `timeout` seconds (None: no limit) for the first."""
        for worker in ready(self._workers, timeout):
            for task, reply in worker.receive():
                self._replies[task.message.metadata.message_id] = reply

    def _replace_late(self) -> None:
        for worker in self._workers:
            if worker.tasks:
                worker.give_up()
                worker.start()

    def _hand_over(self, worker: ClientWorker) -> None:
        """Give the clients and messages of a worker without room to another one, for the rest of the run."""
        others = [other for other in self._workers if other is not worker]
        if not others:
            return
        heir = min(others, key=lambda other: len(other.contexts))
        self._workers.remove(worker)
        heir.adopt(worker)
        self._worker_of |= dict.fromkeys(worker.contexts, heir)

    def close(self) -> None:
        """Stop the workers, and Ray when this grid started it or connected to it."""
        stop(self._workers)
        self._workers, self._shared = [], SharedTensors()
        if self._own_cluster:
            self._ray.shutdown()
