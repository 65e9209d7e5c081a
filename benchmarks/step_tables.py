"""What `steps.py` reads of the papers' tables, and the tables that it writes."""

import argparse
import csv
import platform
from pathlib import Path

import pandas as pd
import torch

from fedsim.assembly import build_recipe
from fedsim.experiment import Experiment
from fedsim.methods import METHODS
from fedsim.recipe import Recipe
from fedsim.sweep.estimate import COLUMNS, FILE, KEY
from fedsim.sweep.tables import find_table, read_table, row_experiment
from strategies.banks.global_batch_norm import GlobalBatchNorm


def table_experiments(name: str, chosen: list[str]) -> dict[str, list[Experiment]]:
    """{block: experiments} of the rows of a table that can be timed here, each once; `chosen` methods, or all."""
    file = find_table(name)
    if file is None:
        raise SystemExit(f"no table {name!r}")
    found = {}
    for block in read_table(file).blocks:
        rows = [row_experiment(block, row) for row in block.rows if not chosen or row.method in chosen]
        found[block.name] = [experiment for experiment in rows if stands_alone(build_recipe(experiment))]
    return found


def stands_alone(recipe: Recipe) -> bool:
    """Whether a step needs neither other images than the client's own nor what other clients sent."""
    return (recipe.augment is None or recipe.augment.late) and all(
        isinstance(bank, GlobalBatchNorm) for bank in recipe.banks
    )


def machine_name(device: str) -> str:
    """The GPU's or the processor's name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def record(found: dict[tuple[str, ...], float], args: argparse.Namespace) -> None:
    """Add to step_times.csv, in place of what it held for the same settings."""
    frame = pd.read_csv(FILE, dtype=str)
    machine = {"machine": machine_name(args.device), "threads": str(args.threads), "torch": torch.__version__}
    rows = [{**dict(zip(KEY, key)), "milliseconds": f"{value:.1f}", **machine} for key, value in found.items()]
    joined = pd.concat([frame, pd.DataFrame(rows)]).drop_duplicates(list(KEY), keep="last").sort_values(list(KEY))
    joined[list(COLUMNS)].to_csv(FILE, index=False)


def write_costs(file: Path, ratios: dict[str, float], setting: str) -> None:
    """A row per method; those of an earlier call in the same setting stay."""
    found: dict[str, str] = {}
    if file.is_file():
        with file.open(newline="") as handle:
            found = {row["method"]: row["ratio"] for row in csv.DictReader(handle) if row["measured"] == setting}
    found |= {method: f"{ratio:.3f}" for method, ratio in ratios.items()}
    with file.open("w", newline="") as handle:
        table = csv.writer(handle, lineterminator="\n")
        table.writerow(["method", "ratio", "measured"])
        table.writerows([method, found[method], setting] for method in METHODS if method in found)
