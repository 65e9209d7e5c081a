"""The verb `sweep`. Imports that take long are inside it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsim.commands import options
from fedsim.common.errors import UserError
from fedsim.common.fork_server import start_early
from fedsim.common.lists import names_of, numbers_of

if TYPE_CHECKING:
    from fedsim.studies import Axes, Budget, Cell


def sweep(
    config: options.Config = "digits",
    methods: Annotated[str, typer.Option(help="comma-separated methods (default: fedavg, or all of a table)")] = "",
    targets: Annotated[str, typer.Option(help="comma-separated unseen domains")] = "all",
    seeds: Annotated[str, typer.Option(help="comma-separated seeds (default: 0, or the table's)")] = "",
    grid: Annotated[list[str] | None, typer.Option(help="key=v1,v2 or a+b=1+x,2+y: one more axis (repeatable)")] = None,
    draws: Annotated[int, typer.Option(min=0, help="tune by that many draws, the first being the file's")] = 0,
    trials: Annotated[int, typer.Option(min=0, help="with --draws: trials, each with its own splits and seed")] = 0,
    sampler: options.Sampler = "random",
    pruner: options.Pruner = "",
    select: Annotated[str, typer.Option(help="with --draws: oracle also shows the best draws on the target")] = "",
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
    from fedsim.studies import Axes, Budget, run_sweep
    from fedsim.studies.tables import Choice, find_table, run_table

    named, numbers = names_of("--methods", methods), numbers_of("--seeds", seeds)
    budget = Budget(jobs, cores_per_cell, gpus_per_cell, ray, launcher)
    overrides = with_options(options.cell_options(cores_per_cell, set_), options.short_options(callback=callback))
    if (table := find_table(config)) and (grid or preset or draws):
        raise UserError(f"{config} is a table: it has no --grid, --preset and --draws; use --set, or its experiment")
    if not draws and (trials or select or pruner or sampler != "random"):
        raise UserError("--trials, --sampler, --pruner and --select belong to --draws")
    if table:
        choice = Choice(named, [] if targets.strip() == "all" else names_of("--targets", targets), numbers)
        failed = run_table(table, choice, budget, overrides=overrides, output=output, dry_run=dry_run)
    else:
        overrides = with_options(overrides, options.short_options(output=output))
        axes = Axes(named or ["fedavg"], names_of("--targets", targets) or ["all"], numbers or [0], grid or ())
        run = _tuned(draws, trials, (sampler, pruner), select, seeds) if draws else run_sweep
        failed = run(config, axes, budget, overrides=overrides, preset=preset, dry_run=dry_run)
    raise typer.Exit(1 if failed else 0)


def _tuned(draws: int, trials: int, chooser: tuple[str, str], select: str, seeds: str) -> "Callable[..., list[Cell]]":
    """What runs a sweep with draws, as `run_sweep` runs one without."""
    from fedsim.settings.experiment import with_options
    from fedsim.studies.draws import Draws, run_draws

    if trials and seeds:
        raise UserError("--trials K is --seeds 0,...,K-1; use one of the two")

    def run(config: str, axes: "Axes", budget: "Budget", *, overrides: Sequence[str], **how: Any) -> "list[Cell]":
        if axes.grid:
            raise UserError("--draws draws all settings that papers tune; fix one with --set in place of --grid")
        wanted = Draws(axes.methods, axes.targets, range(trials) or axes.seeds, draws, *chooser)
        overrides = with_options(overrides, ["data.split_seed=-1"])  # a trial has splits of its own
        return run_draws(config, wanted, budget, overrides=overrides, select=select or "best_validation", **how)

    return run
