"""What the strategy notes down during a round, for the records."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord

from fedsim.arrays import nbytes


@dataclass
class RoundLog:
    """What is known of one round, for the records: one row per client, totals, details."""

    round: int
    started: float = field(default_factory=time.perf_counter)
    clients: dict[str, dict[str, Any]] = field(default_factory=dict)
    details: list[dict[str, Any]] = field(default_factory=list)
    aggregation_seconds: float = 0.0

    def row(self, client: str) -> dict[str, Any]:
        """The client's row, made on first use."""
        return self.clients.setdefault(client, {"client": client, "status": "ok", "bytes_down": 0, "bytes_up": 0})

    def count(self, client: str, direction: str, records: Mapping[str, ArrayRecord]) -> None:
        """Add the tensor bytes of records to the client's row, in total and by record name."""
        row = self.row(client)
        for name, record in records.items():
            size = nbytes(record)
            for column in (f"bytes_{direction}", f"bytes_{direction}_{name}"):
                row[column] = row.get(column, 0) + size
