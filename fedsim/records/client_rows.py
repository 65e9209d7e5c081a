"""The rows of clients.csv and details.csv; a round of many clients gets one row per domain instead of per client."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fedsim.common.lists import keys_of
from fedsim.common.tasks import task_of
from fedsim.common.values import Row
from fedsim.records.reading import KEYS
from fedsim.records.recorder import CLIENT_COLUMNS, DETAIL_COLUMNS, columns_for

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 200  # up to so many clients in a round have a row each
MOST_LINES = 12  # of methods, clients or domains in one panel
SUMMED = ("examples", "images", "steps", "weight", "validation_examples")  # bytes and seconds are summed too
TEXTS = ("round", "client", "domain", "status")
CONTAINERS = ("features", "backbone", "module", "model", "net")  # modules whose name says nothing of a layer


def client_rows(rows: list[Row], unit: str = "auto") -> list[Row]:
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
    domains: dict[str, list[Row]] = {}
    failed = []
    for row in rows:
        if row["status"] == "ok":
            domains.setdefault(row["domain"], []).append(row)
        else:
            failed.append(row)
    merged = [_of_domain(domain, clients) for domain, clients in domains.items()]
    return merged + failed


def detail_rows(
    details: list[Row],
    clients: int,
    domain_of: Callable[[str], str],
    unit: str = "auto",
) -> list[Row]:
    """The rows of details.csv: unchanged, or means over a domain's clients when `client_rows` gives rows of domains."""
    if unit == "clients" or (unit == "auto" and clients <= MOST_ROWS):
        return details
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in details:
        client = row["client"]
        if "/" in client:
            client = f"{domain_of(client)}/*"
        group = client, row["quantity"], row["name"]
        groups.setdefault(group, []).append(row["value"])
    rows = []
    for key, values in groups.items():
        mean = float(np.mean(values))
        rows.append(dict(zip(DETAIL_COLUMNS[1:], (*key, mean))))
    return rows


def _of_domain(domain: str, rows: list[Row]) -> Row:
    """One row for the clients of a domain."""
    merged: Row = {
        "round": rows[0]["round"],
        "client": f"{domain}/*",
        "domain": domain,
        "status": "ok",
    }
    for column in keys_of(rows):
        filled = [row for row in rows if row.get(column) is not None]
        if not filled or column in TEXTS:
            continue
        if column in SUMMED or column.startswith("bytes_") or column.endswith("_seconds"):
            merged[column] = sum(row[column] for row in filled)
        else:
            merged[column] = _mean(column, filled)
    merged["clients"] = len(rows)
    return merged


def _mean(column: str, rows: list[Row]) -> float:
    """The mean over clients, weighted by the examples on which a column rests, where it rests on some."""
    examples = ""
    if column == "train_loss":
        examples = "examples"
    elif column.startswith(("validation_", "local_validation_")):
        examples = "validation_examples"
    values = [row[column] for row in rows]
    weights = [row.get(examples) or 0 for row in rows]
    if not sum(weights):
        return float(np.average(values))
    return float(np.average(values, weights=weights))


def client_metrics(clients: "pd.DataFrame") -> list[str]:
    """The columns of clients.csv that are drawn: the aggregation weight, and all metrics that the methods added."""
    import pandas as pd

    metric = task_of(clients, "validation_").metric
    of_every_run = {*KEYS, *columns_for(CLIENT_COLUMNS, metric), "label", "clients"}
    of_every_run.remove("weight")
    columns = []
    for column in clients:
        is_no_metric = column.startswith("bytes_") or column.endswith("_valid")  # it says whether a metric is valid
        if column in of_every_run or is_no_metric:
            continue
        values = clients[column]
        if pd.api.types.is_numeric_dtype(values) and values.notna().any():
            columns.append(column)
    return columns


def client_key(clients: "pd.DataFrame") -> "tuple[pd.DataFrame, str, str]":
    """(frame, column whose values get a line each, words for the title): a line per client, or per domain.

    With too many clients there is a line per domain, and with too many domains one line for all clients. Records of
    very many clients have one row per domain already, `name/*`: sums of weights and counts, means of other numbers.
    """
    names = clients["client"]
    if names.str.endswith("/*").any():
        return clients, "client", "of each domain's clients together"
    if names.nunique() <= MOST_LINES:
        return clients, "client", "of each client"
    before_slash = names.str.rpartition("/")[0]
    domains = before_slash.where(names.str.contains("/"), names)
    if domains.nunique() <= MOST_LINES:
        return clients.assign(domain=domains), "domain", "of the clients of each domain"
    return clients.assign(domain="all clients"), "domain", "of all clients"


def with_layer_groups(details: "pd.DataFrame") -> "pd.DataFrame":
    """Return details.csv with the column `group` (`layer_group`); a row without a client is of the server."""
    names = details["name"].fillna("")
    clients = details["client"].fillna("server")
    return details.assign(group=names.map(layer_group), client=clients.astype(str))


def layer_group(name: str) -> str:
    """`features.layer1.0.bn1.weight` -> `layer1`: the first part of a tensor's name that is not only a container."""
    parts = [part for part in name.split(".") if part not in CONTAINERS]
    if len(parts) > 1 and parts[1].isdigit() and parts[0] in ("blocks", "layers", "conv"):
        return f"{parts[0]}.{parts[1]}"
    return parts[0] if parts else name
