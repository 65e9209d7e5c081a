"""The rows of clients.csv and details.csv; a round of many clients gets one row per domain instead of per client."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from fedsim.common.tasks import task_of
from fedsim.results.reading import KEYS
from fedsim.results.recorder import CLIENT_COLUMNS, columns_for

MOST_ROWS = 200  # up to so many clients in a round have a row each
MOST_LINES = 12  # of methods, clients or domains in one panel
SUMMED = ("examples", "images", "steps", "weight", "validation_examples")  # bytes and seconds are summed too
WORDS = ("round", "client", "domain", "status")


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
        if known and (column in SUMMED or column.startswith("bytes_") or column.endswith("_seconds")):
            merged[column] = sum(row[column] for row in known)
        elif known:
            merged[column] = _mean(column, known)
    return {**merged, "clients": len(rows)}


def _mean(column: str, rows: list[dict[str, Any]]) -> float:
    unit = "examples" if column == "train_loss" else "validation_examples" if column.startswith("validation_") else ""
    weights = [row.get(unit) or 0 for row in rows]
    return float(np.average([row[column] for row in rows], weights=weights if sum(weights) else None))


def client_metrics(clients: pd.DataFrame) -> list[str]:
    """The columns of clients.csv that are drawn: the aggregation weight, and all metrics that the methods added."""
    metric = task_of(clients, "validation_").metric
    known = {*KEYS, *columns_for(CLIENT_COLUMNS, metric), "label", "clients"} - {"weight"}
    return [
        column
        for column in clients
        if column not in known
        and not column.startswith("bytes_")
        and not column.endswith("_valid")  # says whether a metric is valid
        and pd.api.types.is_numeric_dtype(clients[column])
        and clients[column].notna().any()
    ]


def client_key(clients: pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """(frame, column whose values get a line each, words for the title): a line per client, or per domain.

    With too many clients there is a line per domain, and with too many domains one line for all clients. Records of
    very many clients have one row per domain already, `name/*`: sums of weights and counts, means of other numbers.
    """
    if clients["client"].str.endswith("/*").any():
        return clients, "client", "of each domain's clients together"
    if clients["client"].nunique() <= MOST_LINES:
        return clients, "client", "of each client"
    domains = clients["client"].str.rpartition("/")[0].where(clients["client"].str.contains("/"), clients["client"])
    if domains.nunique() <= MOST_LINES:
        return clients.assign(domain=domains), "domain", "of the clients of each domain"
    return clients.assign(domain="all clients"), "domain", "of all clients"


def layer_group(name: str) -> str:
    """`features.layer1.0.bn1.weight` -> `layer1`: the first part of a tensor's name that is not only a container."""
    parts = [part for part in name.split(".") if part not in ("features", "backbone", "module", "model", "net")]
    if len(parts) > 1 and parts[1].isdigit() and parts[0] in ("blocks", "layers", "conv"):
        return ".".join(parts[:2])
    return parts[0] if parts else name
