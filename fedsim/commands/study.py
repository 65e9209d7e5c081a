"""The verbs below `fedsim study`. Imports that take long are inside them."""

import typer

from fedsim.commands import options
from fedsim.common.fork_server import start_early
from fedsim.common.lists import names_of, numbers_of

app = typer.Typer(no_args_is_help=True)


@app.callback()
def overall() -> None:
    """Questions that take many runs."""


@app.command()
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
