"""Invented records of any size and with any names: many methods, targets, seeds or clients, long and foreign names."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.results import Recorder, summary_row
from fedsim.settings.experiment import from_table

COUNTS = {"bytes_down": 4_000_000, "bytes_up": 4_000_000, "bytes_down_arrays": 4_000_000, "bytes_up_arrays": 4_000_000}


def write_crowd(
    root: Path,
    methods: Sequence[str],
    targets: Sequence[str],
    seeds: int = 1,
    rounds: int = 4,
    clients: int = 1,
    drawn: int = 0,
    labels: Sequence[str] = (),
    missing: Sequence[tuple[str, str, int]] = (),
    name: str = "crowd",
) -> Path:
    """Write a run of each method, target and seed except the missing ones.

    It has the given number of clients per domain, and the given number of them is drawn in each round.
    """
    for method, label in zip(methods, labels or methods):
        for target in targets:
            for seed in range(seeds):
                if (method, target, seed) not in missing:
                    _write_run(root, name, method, label, target, seed, targets, rounds, clients, drawn)
    return root / name


def _write_run(root, name, method, label, target, seed, targets, rounds, clients, drawn):
    experiment = from_table(
        {
            "name": name,
            "data": {"dataset": "folder", "domains": list(targets)},
            "train": {"rounds": rounds},
            "method": {"name": method},
            "run": {"target": target, "seed": seed},
        }
    )
    recorder = Recorder(root / name / method / str(list(targets).index(target)) / f"seed{seed}")
    recorder.write_experiment(experiment.toml())
    rng = np.random.default_rng([seed, sum(map(ord, method + target))])
    sources = [domain for domain in targets if domain != target]
    names = [f"{domain}/{number}" if clients > 1 else domain for domain in sources for number in range(clients)]
    rows = []
    for number in range(rounds + 1):
        grown = 1 - np.exp(-number / 4)
        row = {"round": number, "mean_validation_accuracy": float(grown), "target_accuracy": float(0.7 * grown)}
        row["target_accuracy"] = abs(row["target_accuracy"] + float(0.03 * rng.standard_normal()))
        here = list(rng.choice(names, drawn, replace=False)) if drawn else names
        if number:
            row |= {"bytes_down": 4_000_000 * len(here), "bytes_up": 4_000_000 * len(here), "round_seconds": 2.0}
            weights = rng.dirichlet(np.full(len(here), 5.0))
            recorder.append_clients(
                {
                    "round": number,
                    "client": client,
                    "domain": client.rpartition("/")[0] or client,
                    "status": "ok",
                    "weight": float(weight),
                    "validation_accuracy": float(grown),
                    **COUNTS,
                }
                for client, weight in zip(here, weights)
            )
        recorder.append_round(row)
        rows.append(row)
    recorder.write_summary(summary_row(experiment, pd.DataFrame(rows), label=label))
