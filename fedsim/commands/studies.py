"""The verbs that take many runs: `sweep`, `search` and `study`. Imports that take long are inside them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from fedsim.commands import options
from fedsim.common.errors import UserError
from fedsim.common.fork_server import start_early
from fedsim.common.lists import names_of, numbers_of

if TYPE_CHECKING:
    from pathlib import Path

    from fedsim.studies import Budget, Cell
    from fedsim.studies.combinations import Combination

Choice = tuple[list[str], list[str], list[int]]  # methods, targets and seeds of the options; empty where none is given
study = typer.Typer(no_args_is_help=True)


def sweep(
    config: options.Config = "digits",
    methods: options.Methods = "",
    targets: options.Targets = "all",
    seeds: options.SweepSeeds = "",
    grid: options.Grid = None,
    draws: options.Draws = 0,
    trials: options.DrawTrials = 0,
    sampler: options.Sampler = "random",
    pruner: options.Pruner = "",
    select: options.DrawSelect = "",
    jobs: options.Jobs = 0,
    cores_per_cell: options.CoresPerCell = 0,
    gpus_per_cell: options.GpusPerCell = 0,
    ray: options.RayCluster = "",
    launcher: options.Launcher = "",
    output: options.Output = "",
    preset: options.Preset = "",
    dry_run: options.DryRun = False,
    callback: options.Callbacks = None,
    set_: options.Override = None,
) -> None:
    """Run methods x targets x seeds; finished runs are skipped; a failing run is reported at once and again at the end.

    CONFIG may be the table of a paper, e.g. tables/fedig-a-table-5, which names methods, targets and seeds itself.
    With --draws the best draw by source validation counts for each method, unseen domain and trial (DomainBed).
    """
    start_early(wanted=not (dry_run or ray or launcher))
    from fedsim.settings.experiment import with_options
    from fedsim.studies import Budget
    from fedsim.studies.tables import find_table

    table = find_table(config)
    if table and (grid or preset or draws):
        raise UserError(f"{config} is a table: it has no --grid, --preset and --draws; use --set, or its experiment")
    if not draws and (trials or select or pruner or sampler != "random"):
        raise UserError("--trials, --sampler, --pruner and --select belong to --draws")
    choice = names_of("--methods", methods), names_of("--targets", targets), numbers_of("--seeds", seeds)
    budget = Budget(jobs, cores_per_cell, gpus_per_cell, ray, launcher)
    overrides = with_options(options.cell_options(cores_per_cell, set_), options.short_options(callback=callback))
    if table:
        failed = of_a_table(table, choice, budget, overrides, output, dry_run)
    else:
        overrides = with_options(overrides, options.short_options(output=output))
        tuning = draws, trials, sampler, pruner, select
        failed = of_an_experiment(config, choice, grid or (), tuning, budget, overrides, preset, dry_run)
    options.end(failed)


def of_a_table(
    table: "Path", choice: Choice, budget: "Budget", overrides: list[str], output: str, dry_run: bool
) -> "list[Cell]":
    """Run the chosen rows of a paper's table; returns the cells that failed."""
    from fedsim.studies import tables

    methods, targets, seeds = choice
    rows = tables.Choice(methods, [] if targets == ["all"] else targets, seeds)
    return tables.run_table(table, rows, budget, overrides=overrides, output=output, dry_run=dry_run)


def of_an_experiment(
    config: str,
    choice: Choice,
    grid: Sequence[str],
    tuning: tuple[int, int, str, str, str],
    budget: "Budget",
    overrides: list[str],
    preset: str,
    dry_run: bool,
) -> "list[Cell]":
    """Run a grid, or with draws the trials of a tuned sweep; returns the cells that failed."""
    from fedsim.settings.experiment import with_options
    from fedsim.studies import Axes, run_sweep
    from fedsim.studies.draws import Draws, run_draws

    methods, targets, seeds = choice
    draws, trials, sampler, pruner, select = tuning
    axes = Axes(methods or ["fedavg"], targets or ["all"], seeds or [0], grid)
    if not draws:
        return run_sweep(config, axes, budget, overrides=overrides, preset=preset, dry_run=dry_run)
    if trials and seeds:
        raise UserError("--trials K is --seeds 0,...,K-1; use one of the two")
    if grid:
        raise UserError("--draws draws all settings that papers tune; fix one with --set in place of --grid")
    study = Draws(axes.methods, axes.targets, range(trials) or axes.seeds, draws, sampler, pruner)
    overrides = with_options(overrides, ["data.split_seed=-1"])  # a trial has splits of its own
    rule = select or "best_validation"
    return run_draws(config, study, budget, overrides=overrides, select=rule, preset=preset, dry_run=dry_run)


def search(
    config: options.Config = "digits",
    method: options.SearchedMethod = "",
    targets: options.Targets = "all",
    seeds: options.Seeds = "0",
    space: options.Space = None,
    trials: options.SearchTrials = 20,
    sampler: options.Sampler = "random",
    pruner: options.Pruner = "",
    slots: options.Slots = "",
    candidates: options.Candidates = 60,
    confirm: options.Confirm = 0,
    search_seed: options.SearchSeed = 0,
    jobs: options.Jobs = 0,
    cores_per_cell: options.CoresPerCell = 0,
    gpus_per_cell: options.GpusPerCell = 0,
    ray: options.RayCluster = "",
    launcher: options.Launcher = "",
    output: options.Output = "",
    preset: options.Preset = "",
    dry_run: options.DryRun = False,
    set_: options.Override = None,
) -> None:
    """Search hyper-parameters of one method, scored by the source clients' validation alone.

    A trial is run for all targets and seeds. The same command continues a search, and a greater --trials adds to it.
    With --slots it searches combinations of parts for each target, scored on source domains that are left out in turn.
    """
    start_early(wanted=not (dry_run or ray or launcher))
    from fedsim.settings.experiment import with_options
    from fedsim.studies import Budget
    from fedsim.studies.combinations import Combination
    from fedsim.studies.search import Search, run_search

    refuse_together(config, is_of_parts=bool(slots), is_of_values=bool(space or pruner or sampler != "random"))
    budget = Budget(jobs, cores_per_cell, gpus_per_cell, ray, launcher)
    overrides = with_options(options.cell_options(cores_per_cell, set_), options.short_options(output=output))
    axes = method, names_of("--targets", targets) or ["all"], numbers_of("--seeds", seeds) or [0]
    if slots:
        combination = Combination(*axes, names_of("--slots", slots), candidates, search_seed, confirm)
        failed = _combine(config, combination, budget, overrides=overrides, preset=preset, dry_run=dry_run)
    else:
        values = Search(*axes, space or (), trials, search_seed, sampler, pruner)
        failed = run_search(config, values, budget, overrides=overrides, preset=preset, dry_run=dry_run)
    options.end(failed)


def refuse_together(config: str, *, is_of_parts: bool, is_of_values: bool) -> None:
    """UserError for a paper's table, and for options of a search for parts besides those of a search for values."""
    from fedsim.studies.tables import find_table

    if find_table(config):
        raise UserError(f"{config} is a table of a paper, which says how each method is set; search an experiment")
    if is_of_parts and is_of_values:
        raise UserError("--space, --sampler and --pruner are for values, and --slots for parts; use one of the two")


def _combine(
    config: str, combination: "Combination", budget: "Budget", *, overrides: Sequence[str], preset: str, dry_run: bool
) -> "list[Cell]":
    """Search combinations of parts, and show the comparison of the outer run; returns the failed cells."""
    from fedsim.commands.results import chosen_runs, show_comparison
    from fedsim.records.selection import DEFAULT_RULE
    from fedsim.runs.plan import results_folder
    from fedsim.studies.arms import compare_options
    from fedsim.studies.combinations import run_combinations

    failed, study = run_combinations(config, combination, budget, overrides=overrides, preset=preset, dry_run=dry_run)
    if dry_run:
        return failed
    folder = results_folder(study.base.experiment)
    seeds = ",".join(map(str, study.fresh_seeds))
    for target, arms in study.outer.items():
        runs = chosen_runs(folder, "", target, seeds)
        show_comparison(folder, runs, DEFAULT_RULE, *compare_options(study.base, arms), "table")
    return failed


@study.callback()
def overall() -> None:
    """Questions that take many runs."""


@study.command()
def contribution(
    config: options.Config = "digits",
    methods: options.Methods = "",
    targets: options.Targets = "all",
    seeds: options.Seeds = "0",
    jobs: options.Jobs = 0,
    cores_per_cell: options.CoresPerCell = 0,
    gpus_per_cell: options.GpusPerCell = 0,
    ray: options.RayCluster = "",
    launcher: options.Launcher = "",
    output: options.Output = "",
    preset: options.Preset = "",
    dry_run: options.DryRun = False,
    set_: options.Override = None,
) -> None:
    """Leave out one source after the other: what does each contribute to the unseen domains?

    The runs with all sources are those of `fedsim sweep` with the same options, and are not repeated.
    """
    start_early(wanted=not (dry_run or ray or launcher))
    from fedsim.settings.experiment import with_options
    from fedsim.studies import Axes, Budget
    from fedsim.studies.contribution import run_contribution

    budget = Budget(jobs, cores_per_cell, gpus_per_cell, ray, launcher)
    overrides = with_options(options.cell_options(cores_per_cell, set_), options.short_options(output=output))
    axes = Axes(
        names_of("--methods", methods) or ["fedavg"],
        names_of("--targets", targets) or ["all"],
        numbers_of("--seeds", seeds) or [0],
    )
    options.end(run_contribution(config, axes, budget, overrides=overrides, preset=preset, dry_run=dry_run))
