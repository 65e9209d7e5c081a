"""The code of a Ray worker of clients, which runs the client app for them."""

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedsim.common.errors import USER_ERROR, UserError
from fedsim.common.exit_codes import refuse_hidden_packages
from fedsim.flower.identity import with_content
from fedsim.runtime.message_bytes import RecordBytes, answer, select, without_arrays
from fedsim.tensors.arrays import nbytes
from fedsim.tensors.records import arrays_of

BUNDLE_BYTES = 4 * 2**20  # the largest size of replies that are returned together
BUNDLE_SECONDS = 0.5  # the longest work before replies are returned together

Want = tuple[str, int, list[str] | None]  # (name of a record, its position among the sent records, tensors; None: all)
Order = tuple[Message, list[Want]]  # (a message without its array records, where to find these records)


@dataclass(frozen=True)
class WorkerSetup:
    """How a worker is set up: the client app's name, CPU threads, and the driver's folder and environment variables."""

    app: str
    threads: int
    folder: str
    variables: Mapping[str, str]


class ClientActor:
    """One Ray actor. It runs the client app for its clients one after the other and keeps their data in memory."""

    def __init__(self, setup: WorkerSetup, contexts: dict[int, Context]) -> None:
        if Path(setup.folder).is_dir():  # so that relative paths mean the same as on the driver
            os.chdir(setup.folder)
        for name, value in setup.variables.items():
            os.environ.setdefault(name, value)  # a machine that has a data folder of its own uses that
        try:
            refuse_hidden_packages()  # Ray puts the driver's folder first into the module search path
        except UserError as error:
            raise UserError(f"{USER_ERROR}{error}") from None
        import torch

        torch.set_num_threads(setup.threads)
        module, _, attribute = setup.app.partition(":")
        self.app = getattr(importlib.import_module(module), attribute)
        self.contexts = contexts

    def answer(self, orders: Sequence[Order], *records: ArrayRecord) -> list[tuple[Message, dict[str, RecordBytes]]]:
        """The client app's replies to the first orders (at least one), each with its array records separately.

        Replies that are quick and small are returned together, because a call takes longer than such a reply.
        """
        started, size, replies = time.monotonic(), 0, []
        for message, wants in orders:
            reply, arrays = self._reply(message, wants, records)
            replies.append((reply, arrays))
            size += sum(nbytes(content.record) for content in arrays.values())
            if size > BUNDLE_BYTES or time.monotonic() - started > BUNDLE_SECONDS:
                break
        return replies

    def _reply(
        self, message: Message, wants: list[Want], records: Sequence[ArrayRecord]
    ) -> tuple[Message, dict[str, RecordBytes]]:
        content = dict(message.content.items())
        for name, position, names in wants:
            content[name] = records[position] if names is None else select(records[position], names)
        reply = answer(self.app, with_content(message, RecordDict(content)), self.contexts)
        if reply.has_error():
            return reply, {}
        return without_arrays(reply), {name: RecordBytes(record) for name, record in arrays_of(reply.content).items()}

    def adopt(self, contexts: dict[int, Context]) -> None:
        """Take over the clients of a worker that is gone."""
        self.contexts |= contexts

    def pid(self) -> int:
        """The process id, for tests and for finding errors."""
        return os.getpid()
