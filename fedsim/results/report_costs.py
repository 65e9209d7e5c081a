"""The report's table of costs and disclosure: bytes by record, seconds, and texts about each method."""

from collections.abc import Mapping

import pandas as pd

from fedsim.common.tables import MISSING
from fedsim.results import markup
from fedsim.results.comparison import Comparison, shown_label
from fedsim.results.markup import Data
from fedsim.results.reading import Runs

Notes = Mapping[str, Mapping[str, str]]
BYTES_NOTE = (
    "Bytes per round are sums over the clients of a round, mean over the rounds from 1 on. What comes before round 1 "
    "(a first model or style of each client) is in clients.csv under round 0 and in the figure of costs."
)


def megabytes(size: float) -> Data:
    """A size in the unit of its column, so that the column can be filtered by a number."""
    return Data(MISSING if pd.isna(size) else f"{size / 1e6:,.4g}", size / 1e6)


def costs_section(runs: Runs, comparison: Comparison, notes: Notes) -> str:
    """A table of bytes per round by record, seconds per round, and the texts that were given per method."""
    records = [column for column in runs.clients if column.startswith(("bytes_down_", "bytes_up_"))]
    found = (key for method in comparison.methods["method"] for key in notes.get(method, {}))
    texts = [key for key in dict.fromkeys(found) if key != "group"]  # the group stands in the table of results
    heads = [
        "Method",
        "down/round (MB)",
        "up/round (MB)",
        *(_record_head(column) for column in records),
        "s/round",
        *(text.replace("_", " ") for text in texts),
    ]
    by_record = _record_bytes(runs, records, comparison.labels)
    rows: list[markup.Cells] = []
    for _, row in comparison.methods.iterrows():
        sizes = [
            row["bytes_down_per_round"],
            row["bytes_up_per_round"],
            *(by_record.get((row["label"], column), float("nan")) for column in records),
        ]
        seconds, own = row["seconds_per_round"], notes.get(row["method"], {})
        rows.append(
            [
                shown_label(row),
                *map(megabytes, sizes),
                Data(MISSING if pd.isna(seconds) else f"{seconds:.1f}", seconds),
                *(Data(own.get(text, ""), style="long") for text in texts),
            ]
        )
    return markup.table(heads, rows) + markup.bullets([BYTES_NOTE])


def _record_head(column: str) -> str:
    _, direction, record = column.split("_", 2)
    return f"{record} {direction} (MB)"


def _record_bytes(runs: Runs, records: list[str], labels: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Bytes per round of each record. As in the totals, round 0, which comes before training, is not counted."""
    if not records:
        return {}
    clients = runs.clients.assign(label=runs.clients["run"].map(labels))
    trained = clients[clients["round"] >= 1]
    # A record that is not sent in a round counts zero bytes there, so that the records add up to the total.
    sums = trained.groupby(["label", "run", "round"])[records].sum()
    sums = sums.groupby(["label", "run"]).mean().groupby("label").mean()
    return {(str(label), column): value for column in records for label, value in sums[column].items() if value > 0}
