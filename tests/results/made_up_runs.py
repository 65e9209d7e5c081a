"""Tables of runs that were never made, for tests of comparisons."""

import pandas as pd
from invented import pacs_experiment

from fedsim.results import Runs

# Accuracy by (method, target) for seeds 0, 1, 2.
FEDAVG = {"photo": (0.90, 0.92, 0.94), "sketch": (0.60, 0.70, 0.65)}
CSAC = {"photo": (0.95, 0.93, 0.97), "sketch": (0.72, 0.71, 0.73)}


def table_of_runs(accuracies, experiments=None, labels=None):
    """Runs that have only a summary, from {(method, target, seed): accuracy}."""
    rows, known = [], {}
    for (method, target, seed), accuracy in accuracies.items():
        run = f"{method}/{target}/seed{seed}"
        known[run] = (experiments or {}).get((method, target, seed)) or pacs_experiment(method, target, seed)
        rows.append(
            {
                "run": run,
                "experiment": "pacs",
                "method": known[run].method_name,
                "target": target,
                "seed": seed,
                "label": (labels or {}).get(method, known[run].method_name),
                "best_validation_target_accuracy": accuracy,
                "oracle_target_accuracy": accuracy + 0.01,
                "bytes_down_per_round": 3_000_000,
                "bytes_up_per_round": 1500,
                "seconds_per_round": 2.0 + seed,
                "transductive": method == "fedig-a",
            }
        )
    empty = pd.DataFrame()
    return Runs(pd.DataFrame(rows), empty, empty, empty, known)


def two_methods():
    return table_of_runs(
        {
            (method, target, seed): accuracy
            for method, table in (("fedavg", FEDAVG), ("csac", CSAC))
            for target, values in table.items()
            for seed, accuracy in enumerate(values)
        }
    )


def cell(comparison, label, target):
    cells = comparison.cells
    return cells[(cells["label"] == label) & (cells["target"] == target)].iloc[0]
