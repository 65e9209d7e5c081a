"""Writes the records of a run: rows are appended as they are produced, whole files are replaced atomically.

Every row is one physical line, and floats are written by `repr` (the shortest text that is read as the same number).
Equal numbers therefore give equal bytes, and a line that was not written completely is recognized by its missing end.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.common.about import FORMAT
from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.common.tables import csv_text
from fedsim.common.values import Row
from fedsim.records.csv_file import CHANGED, CsvFile

ROUND_COLUMNS = (
    "round", "train_loss", "mean_validation_accuracy", "mean_validation_loss", "target_accuracy", "target_loss",
    "clients", "failed", "images", "steps", "bytes_down", "bytes_up", "train_seconds", "evaluation_seconds",
    "aggregation_seconds", "round_seconds",
)  # fmt: skip
CLIENT_COLUMNS = (
    "round", "client", "domain", "status", "examples", "images", "steps", "weight", "train_loss",
    "validation_accuracy", "validation_loss", "validation_examples", "bytes_down", "bytes_up", "train_seconds",
    "evaluation_seconds",
)  # fmt: skip
DETAIL_COLUMNS = ("round", "client", "quantity", "name", "value")


def columns_for(columns: Iterable[str], metric: str) -> list[str]:
    """The columns, with the primary metric of the run's task instead of accuracy in their names."""
    return [re.sub(r"accuracy$", metric, column) for column in columns]


class Recorder:
    """The record files of one run's folder; columns are named after its task's primary metric.

    rounds: a row per round. Round 0 is the initial model and has no columns on training.
    clients: a row per round and client; a method's own metrics become new columns.
    details: rows (round, client, quantity, name, value) of layer-wise quantities.

    A run that resumes from the checkpoint of round r first calls `require(r)` and `truncate(r)`. The rows of a round
    wait in memory until `flush` writes them, which must happen before the checkpoint of that round is written;
    otherwise a resumed run would lack rows that an uninterrupted run has.
    """

    def __init__(self, folder: Path | str, metric: str = "accuracy") -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rounds = CsvFile(self.folder / "rounds.csv", columns_for(ROUND_COLUMNS, metric))
        self.clients = CsvFile(self.folder / "clients.csv", columns_for(CLIENT_COLUMNS, metric))
        self.details = CsvFile(self.folder / "details.csv", DETAIL_COLUMNS)

    def require(self, done: int) -> None:
        """UserError when rows of the rounds up to `done` are missing, which a resumed run does not compute again.

        clients.csv has rows of the rounds in which anything was exchanged.
        """
        if done < 0:
            return
        rounds = set(self.rounds.rounds())  # first: it refuses a file that has no column of rounds
        done_rounds = set(range(done + 1))
        with_messages = set()
        for row in self.rounds.numbers():
            if row.get("bytes_down") or row.get("bytes_up"):
                with_messages.add(row["round"])
        for table, recorded, needed in (
            (self.rounds, rounds, done_rounds),
            (self.clients, set(self.clients.rounds()), done_rounds & with_messages),
        ):
            missing = needed - recorded
            if missing:
                raise UserError(
                    f"{table.path}: there is no row of round {min(missing)}, but the run has a checkpoint of "
                    f"round {done}{CHANGED}"
                )

    def truncate(self, after_round: int) -> None:
        """Remove the records of later rounds, for a resumed run; -1 removes everything."""
        for table in (self.rounds, self.clients, self.details):
            table.truncate(after_round)

    def add(self, round_row: Row, clients: Sequence[Row], details: Sequence[Row]) -> None:
        """Adds the rows of a round; `flush` writes them."""
        self.clients.add(clients)
        self.details.add(details)
        self.rounds.add([round_row])

    def flush(self) -> None:
        """Writes the rows that wait; those of rounds last, so that a round in rounds.csv has its other rows."""
        for table in (self.clients, self.details, self.rounds):
            table.flush()

    def write_summary(self, row: Mapping[str, Any]) -> None:
        """Write summary.csv; its presence is what marks a run as finished."""
        atomic_write(self.folder / "summary.csv", csv_text(row, [row]))

    def write_experiment(self, text: str) -> None:
        """Write experiment.toml, the resolved settings."""
        atomic_write(self.folder / "experiment.toml", text)

    def write_environment(self, table: Mapping[str, Any]) -> None:
        """Write environment.json: the format, and the result of `environment()` with what the caller adds."""
        record = {"format": FORMAT, **table}
        atomic_write(self.folder / "environment.json", json.dumps(record, indent=2, sort_keys=True) + "\n")
