"""Options that several verbs of the command line share."""

import json
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

Config = Annotated[
    str, typer.Argument(help="experiment file, or the name of one that comes with fedsim (see `fedsim datasets`)")
]
Methods = Annotated[str, typer.Option(help="comma-separated methods (default: fedavg, or all of a table)")]
Targets = Annotated[str, typer.Option(help="comma-separated unseen domains")]
SweepSeeds = Annotated[str, typer.Option(help="comma-separated seeds (default: 0, or the table's)")]
Seeds = Annotated[str, typer.Option(help="comma-separated seeds")]
Grid = Annotated[list[str] | None, typer.Option(help="key=v1,v2 or a+b=1+x,2+y: one more axis (repeatable)")]
Draws = Annotated[int, typer.Option(min=0, help="tune by that many draws, the first being the file's")]
DrawTrials = Annotated[
    int, typer.Option("--trials", min=0, help="with --draws: trials, each with its own splits and seed")
]
DrawSelect = Annotated[
    str, typer.Option("--select", help="with --draws: oracle also shows the best draws on the target")
]
SearchedMethod = Annotated[str, typer.Option("--method", help="the method, a row or a+b (default: the file's)")]
SearchTrials = Annotated[
    int, typer.Option("--trials", min=2, help="number of trials, with trial 0, the file's own values")
]
SearchSeed = Annotated[int, typer.Option(min=0, help="seed of the draws")]
Override = Annotated[
    list[str] | None, typer.Option("--set", help="override, e.g. train.rounds=5 or method.guiding_head.weight=0.25")
]
Preset = Annotated[str, typer.Option(help="named settings of the file, e.g. a paper's protocol")]
Callbacks = Annotated[
    list[str] | None, typer.Option("--callback", help="your own tracker, package.module:Class (repeatable)")
]
Output = Annotated[str, typer.Option(help="folder of all results (default: outputs)")]
Jobs = Annotated[int, typer.Option(min=0, help="runs at the same time; 0: as many as the cores and GPUs allow")]
CoresPerCell = Annotated[
    int, typer.Option(min=0, help="cores for one run, also set as its run.threads; 0: those of run.threads")
]
GpusPerCell = Annotated[float, typer.Option(min=0, help="GPUs for one run, e.g. 0.25; 0: shared evenly")]
RayCluster = Annotated[
    str, typer.Option(help="run as Ray tasks: local, auto, or a cluster's address (shared --output)")
]
Launcher = Annotated[
    str,
    typer.Option(
        help="'slurm time=MINUTES partition=P mem=16G ...': run as Slurm jobs, with options of sbatch (shared --output)"
    ),
]
Space = Annotated[
    list[str] | None,
    typer.Option(
        help="key=log:LOW:HIGH, key=uniform:LOW:HIGH, key=int:LOW:HIGH or key=v1,v2 (repeatable; "
        "default: what the method's parts and its training declare)"
    ),
]
Sampler = Annotated[
    str, typer.Option(help="random, or tpe or gp of Optuna, which choose by the validation of earlier draws")
]
Pruner = Annotated[
    str, typer.Option(help="median or halving of Optuna: ends draws whose validation falls behind; none without it")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="print the runs and an estimate of their time, and run nothing")
]
Slots = Annotated[str, typer.Option(help="comma-separated slots: search combinations of parts, not values")]
Candidates = Annotated[int, typer.Option("--budget", min=2, help="with --slots: candidates, the base method included")]
Confirm = Annotated[
    int, typer.Option(min=0, help="with --slots: run the winner and its parts on the unseen domain with N new seeds")
]


def short_options(**options: str | int | list[str] | None) -> list[str]:
    """The overrides that options stand for; those without a value are left out."""
    names = {
        "method": "method.name",
        "target": "run.target",
        "seed": "run.seed",
        "runtime": "run.runtime",
        "federation": "run.federation",
        "output": "run.output",
        "callback": "run.callbacks",
    }
    given = {key: value for key, value in options.items() if value not in ("", None, [])}
    # In quotes, so that a domain called 100 or 1.10 remains a text.
    return [f"{names[key]}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]


def cell_options(cores: int, overrides: list[str] | None) -> list[str]:
    """The overrides of a command whose runs have so many cores each; 0: as their settings say."""
    return [*([f"run.threads={cores}"] if cores else []), *(overrides or ())]


def end(failed: Sequence[object]) -> NoReturn:
    """End a command that runs cells: with exit code 1 where some failed, else with 0."""
    raise typer.Exit(1 if failed else 0)
