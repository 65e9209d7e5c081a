"""Invented but plausible runs, on disk with any names and of any size, or as tables of summaries alone."""

import base64
import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.records import Recorder, Runs, summary_row
from fedsim.settings.experiment import Experiment, from_table

PACS = ("art_painting", "cartoon", "photo", "sketch")
LEVELS = {"art_painting": 0.80, "cartoon": 0.77, "photo": 0.93, "sketch": 0.68}
EXAMPLES = {"art_painting": 1844, "cartoon": 2110, "photo": 1503, "sketch": 3537}
LAYERS = ("conv1", "layer1", "layer2", "layer3", "layer4", "fc")
MODEL_BYTES = 44_800_000


def pacs_experiment(
    method: str = "fedavg", target: str = "photo", seed: int = 0, /, name: str = "pacs", **sections: dict
) -> Experiment:
    """Settings of one PACS run at the papers' size; `sections` change single settings."""
    table = {
        "data": {"dataset": "pacs", "image_size": 224}, "model": {"backbone": "resnet18", "weights": "imagenet"},
        "train": {"rounds": 12}, "method": {"name": method}, "run": {"target": target, "seed": seed},
    }  # fmt: skip
    return from_table({"name": name} | {key: own | sections.get(key, {}) for key, own in table.items()})


def write_run(
    root: Path, experiment: Experiment, skill: float = 0.0, finish: bool = True, clients: int = 1, drawn: int = 0
) -> Path:
    """One run's folder with smooth saturating curves; `skill` raises the target accuracy.

    clients: of each domain. drawn: of all clients in each round; 0 means all.
    """
    run, domains = experiment.run, experiment.data.domains or PACS
    folder = root / experiment.name / experiment.method_name / run.target.replace("/", "_") / f"seed{run.seed}"
    rng = np.random.default_rng([run.seed, len(experiment.method_name), list(domains).index(run.target)])
    recorder = Recorder(folder)
    recorder.write_experiment(experiment.toml())
    recorder.write_environment({"python": "3.11.7", "device": "cpu", "packages": {"torch": "2.12.0"}})
    sources = [domain for domain in domains if domain != run.target]
    names = [f"{domain}/{number}" if clients > 1 else domain for domain in sources for number in range(clients)]
    rows = [_round(experiment, number, skill, len(names), rng) for number in range(experiment.train.rounds + 1)]
    recorder.rounds.append(rows)
    for row in rows[1:]:
        own = list(rng.choice(names, drawn, replace=False)) if drawn else names
        recorder.clients.append([_client(experiment, row, name, rng) for name in own])
        if experiment.method_name == "csac":
            recorder.details.append(_details(row["round"], own, rng))
    if finish:
        recorder.write_summary(summary_row(experiment, pd.DataFrame(rows)))
    return folder


def write_grid(root: Path, methods: dict[str, float], rounds: int, targets: Iterable[str]) -> Path:
    """Runs of all methods (name -> skill) on PACS domains, with two seeds."""
    for method, skill in methods.items():
        for target, seed in product(targets, (0, 1)):
            write_run(root, pacs_experiment(method, target, seed, train={"rounds": rounds}), skill)
    return root / "pacs"


def _round(experiment: Experiment, number: int, skill: float, clients: int, rng: np.random.Generator) -> dict:
    level = LEVELS.get(experiment.run.target, 0.7)
    grown = 1 - math.exp(-number / 4)
    row = {
        "round": number,
        "mean_validation_accuracy": float(0.14 + 0.80 * grown + 0.006 * rng.standard_normal()),
        "mean_validation_loss": 2 - 1.7 * grown,
        "target_accuracy": float(np.clip(0.14 + (level + skill - 0.14) * grown + 0.012 * rng.standard_normal(), 0, 1)),
        "target_loss": 2 - 1.3 * grown,
        "evaluation_seconds": 1.5,
    }
    if number == 0:
        return row
    return row | {
        "train_loss": 1.9 * (1 - grown) + 0.2, "clients": clients, "failed": 0, "bytes_down": clients * MODEL_BYTES,
        "bytes_up": clients * MODEL_BYTES, "train_seconds": 20 + rng.random(), "aggregation_seconds": 0.1,
        "round_seconds": 22 + 400 * max(skill, 0) + rng.random(),
    }  # fmt: skip


def _client(experiment: Experiment, row: dict, name: str, rng: np.random.Generator) -> dict:
    domain = name.partition("/")[0] if name.rpartition("/")[2].isdigit() else name
    examples, number = EXAMPLES.get(domain, 100), row["round"]
    sent = {f"bytes_{way}{record}": MODEL_BYTES for way in ("down", "up") for record in ("", "_arrays")}
    own = {"weight": examples / 7500}
    if experiment.method_name == "feddg-ga":
        own = {"weight": 1 / 3 + 0.1 * math.sin(number / 3 + examples), "gap": 0.5 / number + 0.05 * rng.random()}
    return {
        "round": number, "client": name, "domain": domain, "status": "ok", "examples": examples, "train_loss": 0.5,
        "validation_accuracy": row["mean_validation_accuracy"] + 0.02 * rng.standard_normal(), "validation_loss": 0.4,
        "validation_examples": examples // 9, "train_seconds": 6.5 + rng.random(), "evaluation_seconds": 0.4, **sent,
        **own,
    }  # fmt: skip


def _details(number: int, clients: Iterable[str], rng: np.random.Generator) -> list[dict]:
    return [
        {"round": number, "client": client, "quantity": quantity, "name": f"{layer}.weight", "value": value}
        for client in clients
        for depth, layer in enumerate(LAYERS)
        for quantity, value in (
            ("divergence_weight", float(1 / 3 + 0.02 * depth * rng.standard_normal())),
            ("alpha", float(rng.beta(2 + depth, 3))),
        )
    ]


def embedded(page: str) -> dict:
    """The numbers that a report's page contains for its charts and the pages of runs."""
    (packed,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


FEDAVG = {"photo": (0.90, 0.92, 0.94), "sketch": (0.60, 0.70, 0.65)}
CSAC = {"photo": (0.95, 0.93, 0.97), "sketch": (0.72, 0.71, 0.73)}

ByTarget = Mapping[str, Sequence[float] | Mapping[int, float]]  # the accuracies of seeds 0, 1, ..., or by seed


def table_of_runs(
    accuracies: Mapping[str, ByTarget],
    settings: Mapping[str, Experiment | Callable[[str, int], Experiment]] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Runs:
    """Runs that have only a summary, with images of a size that no paper has.

    settings: by method, the same for all its runs or a function of target and seed
    """
    rows, known = [], {}
    for method, by_target in accuracies.items():
        for target, values in by_target.items():
            for seed, accuracy in values.items() if isinstance(values, Mapping) else enumerate(values):
                own = (settings or {}).get(method) or pacs_experiment(method, target, seed, data={"image_size": 64})
                run, experiment = f"{method}/{target}/seed{seed}", own(target, seed) if callable(own) else own
                known[run] = experiment
                label = (labels or {}).get(method, experiment.method_name)
                own = [run, experiment.method_name, target, seed, label, accuracy, accuracy + 0.01, 2.0 + seed]
                rows.append([*own, method == "fedig-a"])
    names = ["run", "method", "target", "seed", "label", "best_validation_target_accuracy", "oracle_target_accuracy"]
    summary = pd.DataFrame(rows, columns=[*names, "seconds_per_round", "transductive"])
    summary = summary.assign(experiment="pacs", bytes_down_per_round=3_000_000, bytes_up_per_round=1500)
    return Runs(summary, *[pd.DataFrame()] * 3, known)


def one_each(*methods: str | Experiment, **more) -> Runs:
    """One run on photo of each method, or with each of these settings; each is better than the one before."""
    names = [method if isinstance(method, str) else f"{index}" for index, method in enumerate(methods)]
    settings = {name: method for name, method in zip(names, methods) if not isinstance(method, str)}
    accuracies = {name: {"photo": [0.5 + index / 10]} for index, name in enumerate(names)}
    return table_of_runs(accuracies, settings, **more)


def two_methods() -> Runs:
    return table_of_runs({"fedavg": FEDAVG, "csac": CSAC})


def cell(comparison, label, target):
    cells = comparison.cells
    return cells[(cells["label"] == label) & (cells["target"] == target)].iloc[0]


def notes_of(comparison, *starts: str) -> list[str]:
    """The notes that begin with one of these texts."""
    return [note for note in comparison.notes if note.startswith(starts)]
