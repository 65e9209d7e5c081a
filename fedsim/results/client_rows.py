"""The rows of clients.csv and details.csv; a round of many clients gets one row per domain instead of per client."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

MOST_ROWS = 200  # up to so many clients in a round have a row each
SUMMED = ("examples", "images", "steps", "weight", "validation_examples")  # bytes and seconds are summed too
WORDS = ("round", "client", "domain", "status")

ClientRow = Mapping[str, Any]


def client_rows(rows: list[dict[str, Any]], wanted: str = "auto") -> list[dict[str, Any]]:
    """The rows of a round as they are recorded.

    wanted: `clients` for one row per client, `domains` for one row per domain. `auto` is one row per client in rounds
    of up to 200 clients and one per domain in larger ones.

    The client of a domain's row is called DOMAIN/*, and its column `clients` says how many clients the row sums up.
    Counts, weights, bytes and seconds are sums; `train_loss` is the mean weighted by examples; validation metrics are
    means weighted by validation examples; all other numbers are plain means over the clients that have them. A client
    that failed keeps a row of its own.
    """
    if wanted == "clients" or (wanted == "auto" and len(rows) <= MOST_ROWS):
        return rows
    domains: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok":
            domains.setdefault(row["domain"], []).append(row)
    failed = [row for row in rows if row["status"] != "ok"]
    return [_of_domain(domain, own) for domain, own in domains.items()] + failed


def detail_rows(
    details: list[dict[str, Any]], clients: int, domain_of: Callable[[str], str], wanted: str = "auto"
) -> list[dict[str, Any]]:
    """The rows of details.csv: unchanged, or means over a domain's clients when `client_rows` gives rows of domains."""
    if wanted == "clients" or (wanted == "auto" and clients <= MOST_ROWS):
        return details
    values: dict[tuple[str, str, str], list[float]] = {}
    for row in details:
        own = "/" in row["client"]
        client = f"{domain_of(row['client'])}/*" if own else row["client"]
        values.setdefault((client, row["quantity"], row["name"]), []).append(row["value"])
    return [
        {"client": client, "quantity": quantity, "name": name, "value": float(np.mean(found))}
        for (client, quantity, name), found in values.items()
    ]


def _of_domain(domain: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"round": rows[0]["round"], "client": f"{domain}/*", "domain": domain, "status": "ok"}
    for column in dict.fromkeys(column for row in rows for column in row if column not in WORDS):
        known = [row for row in rows if row.get(column) is not None]
        values = [row[column] for row in known]
        if not values:
            continue
        if column in SUMMED or column.startswith("bytes_") or column.endswith("_seconds"):
            merged[column] = sum(values)
        else:
            merged[column] = _mean(values, _weights(column, known))
    return {**merged, "clients": len(rows)}


def _weights(column: str, rows: Iterable[ClientRow]) -> list[float]:
    unit = "examples" if column == "train_loss" else "validation_examples" if column.startswith("validation_") else ""
    return [row.get(unit) or 0 for row in rows] if unit else []


def _mean(values: list[float], weights: list[float]) -> float:
    return float(np.average(values, weights=weights)) if sum(weights) else float(np.mean(values))
