"""What the folder of an app's run says when the app is started again: its clients, its configs and its numbers."""

import csv
import logging
from collections.abc import Mapping
from pathlib import Path

from fedsim.common.errors import UserError
from fedsim.common.values import JsonTable
from fedsim.records.csv_file import CsvFile
from fedsim.records.environment import read_environment
from fedsim.records.reading import read_settings
from fedsim.records.recorder import ROUND_COLUMNS
from fedsim.runs.plan import Plan

logger = logging.getLogger("flwr.fedsim")
TEXTS = ("round", "client", "domain", "status")  # columns of clients.csv that are no numbers of the client
KEY = "app_clients"  # in environment.json: the clients that train

ByClient = dict[str, dict[str, float]]


def refuse_other_clients(plan: Plan) -> None:
    """Raises UserError when the run in the plan's folder has other clients.

    Logs a warning when clients have no names of their own, because such a run cannot be resumed.
    """
    now = {*plan.experiment.data.domains, *plan.clients}
    then = now
    if (plan.folder / "experiment.toml").is_file():
        recorded = read_environment(plan.folder).get(KEY, plan.clients)
        then = {*read_settings(plan.folder).data.domains, *recorded}
    nameless = any(name.startswith("node-") for name in now)
    hint = "reply with ConfigRecord({'domain': NAME}) in each client's messages"
    if then != now:
        names = f"give every client a name that stays ({hint}), and " if nameless else ""
        gone = ", ".join(sorted(then - now)) or "none more"
        new = ", ".join(sorted(now - then)) or "none more"
        raise UserError(f"{plan.folder} holds a run of other clients ({gone}) than those of today ({new}); {names}"
                        "choose another output=..., or remove the folder")  # fmt: skip
    if nameless:
        logger.warning("fedsim: clients are called by their nodes, which change from run to run, so that this run "
                       "cannot be resumed; %s", hint)  # fmt: skip


def refuse_other_configs(folder: Path, configs: Mapping[str, JsonTable]) -> None:
    """Raises UserError when the run in a folder sent its clients other configs, or had other arguments."""
    recorded = read_environment(folder).get("app", configs)
    for argument, config in configs.items():
        then = recorded.get(argument, {})
        for name in sorted(then.keys() | config.keys()):
            before, now = (repr(table[name]) if name in table else "absent" for table in (then, config))
            if before != now:
                raise UserError(
                    f"{folder} holds a run with another {argument}: {name} was {before}, and is {now}; "
                    "choose another output=..., or remove the folder"
                )


def log_best_round(folder: Path) -> None:
    """Logs the round that the clients' validation selects, the accuracies there, and the folder of the records."""
    (row,) = csv.DictReader((folder / "summary.csv").read_text().splitlines())
    numbers = {
        "mean validation accuracy": row["best_validation_mean_validation_accuracy"],
        "accuracy on the unseen domain": row["best_validation_target_accuracy"],
    }
    texts = [f"{name} {float(cell):.4g}" for name, cell in numbers.items() if cell not in ("", "nan")]
    number = row["best_validation_round"]
    best = ", ".join([f"best round {number}", *texts]) if number else "no validation selects a round"
    logger.info("fedsim: %s; records: %s", best, folder)


def recorded_numbers(folder: Path) -> tuple[dict[int, ByClient], dict[int, dict[str, float]]]:
    """Returns, by round, (the numbers of each client, accuracy and loss on the unseen domain) of a run's records."""
    clients: dict[int, ByClient] = {}
    lines = (folder / "clients.csv").read_text().splitlines()
    for row in csv.DictReader(lines):
        numbers = {
            name: float(cell)
            for name, cell in row.items()
            if cell and name not in TEXTS
        }  # fmt: skip
        number = int(row["round"])
        by_client = clients.setdefault(number, {})
        by_client[row["client"]] = numbers
    scores: dict[int, dict[str, float]] = {}
    for means in CsvFile(folder / "rounds.csv", ROUND_COLUMNS).numbers():
        if "target_accuracy" in means:
            number = int(means["round"])
            scores[number] = {
                "accuracy": means["target_accuracy"],
                "loss": means.get("target_loss", 0.0),
            }
    return clients, scores
