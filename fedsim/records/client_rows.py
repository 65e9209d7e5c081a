"""The rows of clients.csv and details.csv; a round of many clients gets one row per domain instead of per client."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from fedsim.common.tasks import task_of
from fedsim.records.reading import KEYS
from fedsim.records.recorder import CLIENT_COLUMNS, columns_for

MOST_ROWS = 200  # up to so many clients in a round have a row each
MOST_LINES = 12  # of methods, clients or domains in one panel
SUMMED = ("examples", "images", "steps", "weight", "validation_examples")  # bytes and seconds are summed too
TEXTS = ("round", "client", "domain", "status")
CONTAINERS = ("features", "backbone", "module", "model", "net")  # modules whose name says nothing of a layer


def client_rows(rows: list[dict[str, Any]], unit: str = "auto") -> list[dict[str, Any]]:
    """The rows of a round as they are recorded.

    unit: `clients` for one row per client, `domains` for one row per domain. `auto` is one row per client in rounds
    of up to 200 clients and one per domain in larger ones.

    The client of a domain's row is called DOMAIN/*, and its column `clients` says how many clients the row sums up.
    Counts, weights, bytes and seconds are sums; `train_loss` is the mean weighted by examples; validation metrics are
    means weighted by validation examples; all other numbers are plain means over the clients that have them. A client
    that failed keeps a row of its own.
    """
    if unit == "clients" or (unit == "auto" and len(rows) <= MOST_ROWS):
        return rows
    domains: dict[str, list[dict[str, Any]]] = {}
    failed = []
    for row in rows:
        if row["status"] == "ok":
            domains.setdefault(row["domain"], []).append(row)
        else:
            failed.append(row)
    return [_of_domain(domain, clients) for domain, clients in domains.items()] + failed


def detail_rows(
    details: list[dict[str, Any]],
    clients: int,
    domain_of: Callable[[str], str],
    unit: str = "auto",
) -> list[dict[str, Any]]:
    """The rows of details.csv: unchanged, or means over a domain's clients when `client_rows` gives rows of domains."""
    if unit == "clients" or (unit == "auto" and clients <= MOST_ROWS):
        return details
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in details:
        client = row["client"]
        if "/" in client:
            client = f"{domain_of(client)}/*"
        groups.setdefault((client, row["quantity"], row["name"]), []).append(row["value"])
    rows = []
    for (client, quantity, name), values in groups.items():
        rows.append({"client": client, "quantity": quantity, "name": name, "value": float(np.mean(values))})
    return rows


def _of_domain(domain: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for the clients of a domain."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    merged: dict[str, Any] = {"round": rows[0]["round"], "client": f"{domain}/*", "domain": domain, "status": "ok"}
    for column in columns:
        filled = [row for row in rows if row.get(column) is not None]
        if not filled or column in TEXTS:
            continue
        is_summed = column in SUMMED or column.startswith("bytes_") or column.endswith("_seconds")
        merged[column] = sum(row[column] for row in filled) if is_summed else _mean(column, filled)
    return {**merged, "clients": len(rows)}


def _mean(column: str, rows: list[dict[str, Any]]) -> float:
    """The mean over clients, weighted by the examples on which a column rests, where it rests on some."""
    examples = ""
    if column == "train_loss":
        examples = "examples"
    elif column.startswith("validation_"):
        examples = "validation_examples"
    weights = [row.get(examples) or 0 for row in rows]
    return float(np.average([row[column] for row in rows], weights=weights if sum(weights) else None))


def client_metrics(clients: pd.DataFrame) -> list[str]:
    """The columns of clients.csv that are drawn: the aggregation weight, and all metrics that the methods added."""
    metric = task_of(clients, "validation_").metric
    of_every_run = {*KEYS, *columns_for(CLIENT_COLUMNS, metric), "label", "clients"} - {"weight"}
    columns = []
    for column in clients:
        is_no_metric = column.startswith("bytes_") or column.endswith("_valid")  # it says whether a metric is valid
        if column in of_every_run or is_no_metric:
            continue
        if pd.api.types.is_numeric_dtype(clients[column]) and clients[column].notna().any():
            columns.append(column)
    return columns


def client_key(clients: pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """(frame, column whose values get a line each, words for the title): a line per client, or per domain.

    With too many clients there is a line per domain, and with too many domains one line for all clients. Records of
    very many clients have one row per domain already, `name/*`: sums of weights and counts, means of other numbers.
    """
    if clients["client"].str.endswith("/*").any():
        return clients, "client", "of each domain's clients together"
    if clients["client"].nunique() <= MOST_LINES:
        return clients, "client", "of each client"
    has_number = clients["client"].str.contains("/")
    domains = clients["client"].str.rpartition("/")[0].where(has_number, clients["client"])
    if domains.nunique() <= MOST_LINES:
        return clients.assign(domain=domains), "domain", "of the clients of each domain"
    return clients.assign(domain="all clients"), "domain", "of all clients"


def layer_group(name: str) -> str:
    """`features.layer1.0.bn1.weight` -> `layer1`: the first part of a tensor's name that is not only a container."""
    parts = [part for part in name.split(".") if part not in CONTAINERS]
    if len(parts) > 1 and parts[1].isdigit() and parts[0] in ("blocks", "layers", "conv"):
        return f"{parts[0]}.{parts[1]}"
    return parts[0] if parts else name
