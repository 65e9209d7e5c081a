"""Invented but plausible runs on disk, for the tests of records, tables, plots and the report."""

import math
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.results import Recorder, summary_row
from fedsim.settings.experiment import Experiment, from_table

PACS = ("art_painting", "cartoon", "photo", "sketch")
LAYERS = ("conv1", "layer1", "layer2", "layer3", "layer4", "fc")
MODEL_BYTES = 44_800_000


def pacs_experiment(
    method: str = "fedavg", target: str = "photo", seed: int = 0, /, name: str = "pacs", **sections: dict
) -> Experiment:
    """Settings of one PACS run at the papers' size; `sections` change single settings."""
    table = {
        "name": name,
        "data": {"dataset": "pacs", "image_size": 224} | sections.get("data", {}),
        "model": {"backbone": "resnet18", "weights": "imagenet"} | sections.get("model", {}),
        "train": {"rounds": 12} | sections.get("train", {}),
        "method": {"name": method} | sections.get("method", {}),
        "run": {"target": target, "seed": seed} | sections.get("run", {}),
    }
    return from_table(table)


def write_run(root: Path, experiment: Experiment, skill: float = 0.0, finish: bool = True, label: str = "") -> Path:
    """One run's folder with smooth saturating curves; `skill` raises the target accuracy."""
    folder = root / experiment.name / experiment.method_name / experiment.run.target / f"seed{experiment.run.seed}"
    rng = np.random.default_rng([experiment.run.seed, len(experiment.method_name), PACS.index(experiment.run.target)])
    recorder = Recorder(folder)
    recorder.write_experiment(experiment.toml())
    recorder.write_environment({"python": "3.11.7", "device": "cpu", "packages": {"torch": "2.12.0"}})
    rows = [_round(recorder, experiment, round_, skill, rng) for round_ in range(experiment.train.rounds + 1)]
    if finish:
        recorder.write_summary(summary_row(experiment, pd.DataFrame(rows), label=label))
    return folder


def write_grid(
    root: Path,
    methods: dict[str, float],
    seeds: int = 2,
    rounds: int = 12,
    name: str = "pacs",
    targets: tuple[str, ...] = PACS,
) -> Path:
    """Runs of all methods (name -> skill) on PACS domains."""
    for method, skill in methods.items():
        for target in targets:
            for seed in range(seeds):
                write_run(root, pacs_experiment(method, target, seed, name=name, train={"rounds": rounds}), skill)
    return root / name


def _round(recorder: Recorder, experiment: Experiment, round_: int, skill: float, rng: np.random.Generator) -> dict:
    sources = [domain for domain in PACS if domain != experiment.run.target]
    level = {"art_painting": 0.80, "cartoon": 0.77, "photo": 0.93, "sketch": 0.68}[experiment.run.target]
    grown = 1 - math.exp(-round_ / 4)
    target = float(np.clip(0.14 + (level + skill - 0.14) * grown + 0.012 * rng.standard_normal(), 0, 1))
    validation = float(0.14 + 0.80 * grown + 0.006 * rng.standard_normal())
    row = {
        "round": round_,
        "mean_validation_accuracy": validation,
        "mean_validation_loss": 2 - 1.7 * grown,
        "target_accuracy": target,
        "target_loss": 2 - 1.3 * grown,
        "evaluation_seconds": 1.5,
    }
    if round_ == 0:
        recorder.append_round(row)
        return row
    row |= {
        "train_loss": 1.9 * (1 - grown) + 0.2,
        "clients": 3,
        "failed": 0,
        "bytes_down": 3 * MODEL_BYTES * (2 if experiment.method_name == "csac" else 1),
        "bytes_up": 3 * MODEL_BYTES,
        "train_seconds": 20 + rng.random(),
        "aggregation_seconds": 0.1,
        "round_seconds": 22 + 400 * max(skill, 0) + rng.random(),
    }
    recorder.append_clients([_client(experiment, round_, domain, validation, rng) for domain in sources])
    if experiment.method_name == "csac":
        recorder.append_details(_details(round_, sources, rng))
    recorder.append_round(row)
    return row


def _client(experiment: Experiment, round_: int, domain: str, validation: float, rng: np.random.Generator) -> dict:
    examples = {"art_painting": 1844, "cartoon": 2110, "photo": 1503, "sketch": 3537}[domain]
    row = {
        "round": round_,
        "client": domain,
        "domain": domain,
        "status": "ok",
        "examples": examples,
        "weight": examples / 7500,
        "train_loss": 0.5,
        "validation_accuracy": validation + 0.02 * rng.standard_normal(),
        "validation_loss": 0.4,
        "validation_examples": examples // 9,
        "bytes_down": MODEL_BYTES,
        "bytes_up": MODEL_BYTES,
        "bytes_down_arrays": MODEL_BYTES,
        "bytes_up_arrays": MODEL_BYTES,
        "train_seconds": 6.5 + rng.random(),
        "evaluation_seconds": 0.4,
    }
    if experiment.method_name == "feddg-ga":
        weight = 1 / 3 + 0.1 * math.sin(round_ / 3 + PACS.index(domain))
        row |= {"weight": weight, "gap": 0.5 / round_ + 0.05 * rng.random()}
    return row


def _details(round_: int, sources: list[str], rng: np.random.Generator) -> list[dict]:
    return [
        {"round": round_, "client": client, "quantity": quantity, "name": f"{layer}.weight", "value": value}
        for client in sources
        for depth, layer in enumerate(LAYERS)
        for quantity, value in (
            ("divergence_weight", float(1 / 3 + 0.02 * depth * rng.standard_normal())),
            ("alpha", float(rng.beta(2 + depth, 3))),
        )
    ]
