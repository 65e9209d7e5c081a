"""What the strategy notes during a round for the run's records."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord

from fedsim.common.values import Row
from fedsim.tensors.arrays import nbytes
from strategies.server_round import ServerRound, Update

logger = logging.getLogger("fedsim")


@dataclass
class RoundNotes:
    """The notes of one round: one row per client, totals, and details."""

    round: int
    started: float = field(default_factory=time.perf_counter)
    clients: dict[str, Row] = field(default_factory=dict)
    details: list[Row] = field(default_factory=list)
    aggregation_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # clients that were lost before their reply arrived
    dropped: str = ""  # why the round leaves the model as it was

    def row(self, client: str) -> Row:
        """The client's row, which is made when it is first used."""
        empty: Row = {"client": client, "status": "ok", "bytes_down": 0, "bytes_up": 0}
        return self.clients.setdefault(client, empty)

    def count(self, client: str, direction: str, sizes: Mapping[str, int], known: Collection[str]) -> None:
        """Adds the tensor bytes of records to the client's row, in total and by the record names that are known."""
        row = self.row(client)
        total = f"bytes_{direction}"
        for name, size in sizes.items():
            row[total] = row.get(total, 0) + size
            if name in known:
                column = f"{total}_{name}"
                row[column] = row.get(column, 0) + size

    def fail(self, client: str, reason: str) -> None:
        """Notes in the client's row, and in the log, why something of it was not used."""
        row = self.row(client)
        if row["status"] == "ok":
            row["status"] = reason
        elif reason not in row["status"]:  # training and validation may fail for the same reason
            row["status"] += f"; {reason}"
        self.note(f"client {client!r}: {reason}")

    def drop(self, reason: str) -> None:
        """Notes in the rows so far that the model of this round was dropped, and with it what the clients sent.

        Such a client has done nothing wrong and the run goes on with it. But its model has no weight, and its accuracy
        selects no round.
        """
        self.dropped = reason
        for row in self.clients.values():
            for column in list(row):
                if column == "weight" or column.startswith("local_validation_"):
                    del row[column]
            if row["status"] == "ok":
                row["status"] = f"not used: {reason}"

    def take(self, view: ServerRound) -> None:
        """Keeps the details and the notes that server parts left in their round."""
        self.details += view.details
        for text in view.notes:
            self.note(text)

    def take_model(self, view: ServerRound, updates: Sequence[Update]) -> None:
        """Keeps what a computed model leaves: in the clients' rows their updates and weights, and what the parts say.

        view: the round as its parts left it
        """
        for update in updates:
            row = self.row(update.client)
            row.update(examples=update.examples, **update.metrics)
        for client, weight in view.weights.items():
            row = self.row(client)
            row["weight"] = float(weight)
        self.take(view)
        for client, columns in view.client_columns.items():
            self.row(client).update(columns)

    def note(self, text: str) -> None:
        """Keeps a line that belongs to no single client, and writes it to the log."""
        self.notes.append(text)
        logger.warning("round %d: %s", self.round, text)


def payloads(records: Mapping[str, ArrayRecord]) -> dict[str, int]:
    """The bytes of each record's tensors, by its name."""
    return {name: _payload(record) for name, record in records.items()}


def _payload(record: ArrayRecord) -> int:
    """The bytes of a record's tensors. When a record declares invalid shapes or types: the bytes that it holds."""
    held = 0
    for array in record.values():
        buffer = getattr(array, "data", None)
        if isinstance(buffer, bytes | memoryview):
            held += len(buffer)
    try:
        declared = nbytes(record)
    except Exception:  # a record from another machine may lack tensors, types or shapes
        return held
    is_possible = 0 <= declared <= held
    return declared if is_possible else held
