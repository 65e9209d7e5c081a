"""What the three runtimes cost: seconds per round without training, and seconds from the command to the end of round 1.

The same command runs inline, on Ray and in Flower's own simulation engine, with the same apps. Five clients receive and
return the same model state and validate a few small images, but take no training step: FedSB with a budget of one image
has no batch. Seconds per round are the median of `round_seconds` of rounds.csv over the rounds after the first.

    python benchmarks/runtimes.py [--rounds 20] [--models tiny,resnet18] [--runtimes inline,ray,flower] [--repeats 1]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from turns import medians, say, take_turns

MODELS = {"tiny": ["model.backbone=digits-cnn-bn"], "resnet18": ["model.backbone=resnet18", "data.image_size=8"]}
NO_TRAINING = [
    "method.name=fedsb",
    "method.balanced_budget.budget=1",
    "data.fraction=0.02",
    "run.threads=1",
    "run.checkpoint_every=1000000",
    "run.device=cpu",
]
TARGETS = {("tiny", "inline"): 20.0, ("tiny", "ray"): 8.0, ("resnet18", "inline"): 3.0, ("resnet18", "ray"): 1.5}
CPUS_PER_CLIENT = 1
POLL_SECONDS = 0.02


def measure(runtime: str, model: str, rounds: int) -> tuple[float, float]:
    """(median seconds per round, seconds from the command to the end of round 1) of one run of `fedsim run`."""
    with tempfile.TemporaryDirectory() as output:
        settings = [*NO_TRAINING, *MODELS[model], f"train.rounds={rounds}", f"run.cpus_per_worker={CPUS_PER_CLIENT}"]
        command = [
            sys.executable,
            "-c",
            "from fedsim.commands.cli import main; main()",
            "run",
            "digits",
            "--runtime",
            runtime,
            "--output",
            output,
            *[word for setting in settings for word in ("--set", setting)],
        ]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        first = None
        while process.poll() is None and first is None:
            time.sleep(POLL_SECONDS)
            if any(len(read_rounds(file)) > 1 for file in Path(output).glob("**/rounds.csv")):
                first = time.perf_counter() - started
        text, _ = process.communicate()
        if process.returncode or first is None:
            raise SystemExit(f"{' '.join(command)} failed with {process.returncode}:\n{text}")
        (file,) = Path(output).glob("**/rounds.csv")
        seconds = read_rounds(file)["round_seconds"].iloc[2:]
        return statistics.median(seconds), first


def read_rounds(file: Path) -> pd.DataFrame:
    """The rows of rounds.csv that are already written; row 0 is the initial model."""
    return pd.read_csv(file) if file.stat().st_size else pd.DataFrame()


Figures = dict[tuple[str, str], list[float]]  # (model, runtime) -> the result of `measure`


def show(results: Figures, models: list[str], runtimes: list[str], rounds: int) -> None:
    """Print the table: Flower's seconds divided by ours, and the target."""
    table = Table("model", "runtime", "ms per round", "faster than Flower", "promised", "command to round 1")
    for model in models:
        for runtime in runtimes:
            seconds, first = results[model, runtime]
            faster = f"{results[model, 'flower'][0] / seconds:.1f} x" if (model, "flower") in results else ""
            promised = f"{TARGETS[model, runtime]:g} x" if (model, runtime) in TARGETS else ""
            table.add_row(model, runtime, f"{1000 * seconds:.1f}", faster, promised, f"{first:.1f} s")
    table.caption = f"5 clients, median of {rounds - 1} rounds after the first, {CPUS_PER_CLIENT} CPU per client"
    Console(width=100).print(table)


def main() -> None:
    """Run every combination and print medians. The combinations take turns, so that other programs slow all equally."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", default="tiny,resnet18")
    parser.add_argument("--runtimes", default="inline,ray,flower")
    parser.add_argument("--repeats", type=int, default=1)
    wanted = parser.parse_args()
    models, runtimes = wanted.models.split(","), wanted.runtimes.split(",")
    sides = {}
    for model in models:
        for runtime in runtimes:
            sides[model, runtime] = partial(measure, runtime, model, wanted.rounds)
    measured = take_turns(sides, wanted.repeats, show=say)
    show({key: medians(turns) for key, turns in measured.items()}, models, runtimes, wanted.rounds)


if __name__ == "__main__":
    main()
