"""Tables of runs that were never made, for tests of comparisons."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from invented import pacs_experiment

from fedsim.results import Runs
from fedsim.settings.experiment import Experiment

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
                rows.append(
                    {
                        "run": run,
                        "experiment": "pacs",
                        "method": experiment.method_name,
                        "target": target,
                        "seed": seed,
                        "label": (labels or {}).get(method, experiment.method_name),
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
