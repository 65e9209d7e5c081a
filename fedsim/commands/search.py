"""The verb `search`. Imports that take long are inside it."""

import json
from typing import Annotated

import typer

from fedsim.commands.options import (
    Config,
    CoresPerCell,
    DryRun,
    GpusPerCell,
    Jobs,
    Output,
    Override,
    Preset,
    RayCluster,
)
from fedsim.common.errors import UserError
from fedsim.common.lists import names_of, numbers_of


def search(
    config: Config = "digits",
    method: Annotated[str, typer.Option(help="the method, a row or a+b (default: the file's)")] = "",
    targets: Annotated[str, typer.Option(help="comma-separated unseen domains")] = "all",
    seeds: Annotated[str, typer.Option(help="comma-separated seeds")] = "0",
    space: Annotated[
        list[str] | None,
        typer.Option(help="key=log:LOW:HIGH, key=uniform:LOW:HIGH, key=int:LOW:HIGH or key=v1,v2 (repeatable)"),
    ] = None,
    trials: Annotated[int, typer.Option(min=2, help="number of trials, with trial 0, the file's own values")] = 20,
    search_seed: Annotated[int, typer.Option(min=0, help="seed of the draws")] = 0,
    jobs: Jobs = 0,
    cores_per_cell: CoresPerCell = 0,
    gpus_per_cell: GpusPerCell = 0,
    ray: RayCluster = "",
    output: Output = "",
    preset: Preset = "",
    dry_run: DryRun = False,
    set_: Override = None,
) -> None:
    """Search hyper-parameters of one method at random, scored by the source clients' validation alone.

    A trial is run for all targets and seeds. The same command continues a search, and a greater --trials adds to it.
    """
    from fedsim.settings.experiment import with_options
    from fedsim.sweep import Budget
    from fedsim.sweep.search_plan import Search
    from fedsim.sweep.search_run import run_search
    from fedsim.sweep.tables import find_table

    if find_table(config):
        raise UserError(
            f"{config} is a table of a paper, which says itself how each method is set; search an experiment"
        )
    wanted = Search(
        method,
        names_of("--targets", targets) or ["all"],
        numbers_of("--seeds", seeds) or [0],
        space or (),
        trials,
        search_seed,
    )
    overrides = [*([f"run.threads={cores_per_cell}"] if cores_per_cell else []), *(set_ or ())]
    overrides = with_options(overrides, [f"run.output={json.dumps(output, ensure_ascii=False)}"] if output else [])
    budget = Budget(jobs, cores_per_cell, gpus_per_cell, ray)
    failed = run_search(config, wanted, budget, overrides=overrides, preset=preset, dry_run=dry_run)
    raise typer.Exit(1 if failed else 0)
