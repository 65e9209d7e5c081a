"""Reads the papers' tables for `steps.py`, and writes its tables of step times and costs."""

import argparse
import csv
import platform
from pathlib import Path

import pandas as pd
import torch

from fedsim.methods.table import METHODS
from fedsim.settings.experiment import Experiment
from fedsim.studies.estimate import COLUMNS, FILE, KEY
from fedsim.studies.tables import find_table, read_table, row_experiment


def table_experiments(name: str, chosen: list[str]) -> dict[str, list[Experiment]]:
    """{block: experiments} of the rows of a table, each once; only those of the `chosen` methods, if there are any."""
    file = find_table(name)
    if file is None:
        raise SystemExit(f"no table {name!r}")
    found = {}
    for block in read_table(file).blocks:
        rows = [row_experiment(block, row) for row in block.rows if not chosen or row.method in chosen]
        found[block.name] = rows
    return found


def machine_name(device: str) -> str:
    """The name of the GPU or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def record(found: dict[tuple[str, ...], float], args: argparse.Namespace) -> None:
    """Write the times into step_times.csv; they replace older times of the same settings."""
    frame = pd.read_csv(FILE, dtype=str)
    machine = {"machine": machine_name(args.device), "threads": str(args.threads), "torch": torch.__version__}
    rows = [{**dict(zip(KEY, key)), "milliseconds": f"{value:.1f}", **machine} for key, value in found.items()]
    joined = pd.concat([frame, pd.DataFrame(rows)]).drop_duplicates(list(KEY), keep="last").sort_values(list(KEY))
    joined[list(COLUMNS)].to_csv(FILE, index=False)


def written_costs(file: Path, setting: str) -> dict[str, str]:
    """{method: ratio} that the file already holds for this setting."""
    if not file.is_file():
        return {}
    with file.open(newline="") as handle:
        return {row["method"]: row["ratio"] for row in csv.DictReader(handle) if row["measured"] == setting}


def write_costs(file: Path, ratios: dict[str, float], setting: str) -> None:
    """Write a row per method; rows of an earlier call with the same setting are kept."""
    found = written_costs(file, setting) | {method: f"{ratio:.3f}" for method, ratio in ratios.items()}
    with file.open("w", newline="") as handle:
        table = csv.writer(handle, lineterminator="\n")
        table.writerow(["method", "ratio", "measured"])
        table.writerows([method, found[method], setting] for method in METHODS if method in found)
