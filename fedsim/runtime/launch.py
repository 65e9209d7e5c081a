"""Start one experiment on the runtime that it asks for."""

from collections.abc import Sequence
from pathlib import Path

from fedsim.experiment import Experiment
from fedsim.results.callbacks import RunCallback
from fedsim.run.session import run_folder
from fedsim.run.workspace import source_clients
from fedsim.runtime.inline import InlineGrid, LocalGrid
from fedsim.server_app import complete, serve


def launch(experiment: Experiment, callbacks: Sequence[RunCallback] = ()) -> Path:
    """Run the experiment to its end (or resume it); returns the run's folder."""
    experiment = complete(experiment)
    if experiment.run.runtime == "flower":
        from fedsim.runtime.flower import run_with_flower

        run_with_flower(experiment, len(source_clients(experiment)))
        return run_folder(experiment)
    if experiment.run.runtime == "deployment":
        from fedsim.runtime.deployment import run_deployed

        return run_deployed(experiment, callbacks)
    grid = make_grid(experiment)
    try:
        return serve(grid, experiment, callbacks)
    finally:
        grid.close()


def make_grid(experiment: Experiment) -> LocalGrid:
    """The grid of `run.runtime`, with one node per source client."""
    nodes = len(source_clients(experiment))
    if experiment.run.runtime == "ray":
        from fedsim.runtime.ray import RayGrid

        return RayGrid(nodes, experiment.run)
    from fedsim.client_app import app

    return InlineGrid(app, nodes)
