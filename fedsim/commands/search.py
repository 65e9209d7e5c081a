"""The verb `search`. Imports that take long are inside it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsim.commands import options
from fedsim.common.errors import UserError
from fedsim.common.fork_server import start_early
from fedsim.common.lists import names_of, numbers_of

if TYPE_CHECKING:
    from fedsim.studies import Budget, Cell
    from fedsim.studies.combinations import Combination


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
