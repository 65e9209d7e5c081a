"""Starts one run on the runtime that its settings ask for."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from fedsim.apps.client import app
from fedsim.common.garbage import started
from fedsim.records.callbacks import RunCallback
from fedsim.records.results import write_results
from fedsim.runs import admission
from fedsim.runs.plan import Plan, resolve, results_folder
from fedsim.runs.serve import serve
from fedsim.runtime.forked import ForkedGrid
from fedsim.runtime.local_grid import LocalGrid
from fedsim.settings.experiment import Experiment
from fedsim.settings.plugins import load

logger = logging.getLogger("fedsim")

SEPARATE_MACHINES = "fedsim.deploy.runtime:run_deployed"  # found by name: no run of one machine needs the bench
MOST_NODES = 256  # in a simulation; the handshake sends a message to each node and waits for its reply


def launch(experiment: Experiment, callbacks: Sequence[RunCallback] = ()) -> Path:
    """Run the experiment to its end (or resume it); returns the run's folder.

    >>> import tempfile
    >>> from fedsim.settings.experiment import read_experiment
    >>> changes = ["train.rounds=1", "data.fraction=0.05", f"run.output={tempfile.mkdtemp()}"]
    >>> folder = launch(read_experiment("digits", changes))
    >>> (folder / "summary.csv").is_file(), folder.parts[-3:]
    (True, ('fedavg', 'rot75', 'seed0'))
    """
    return carry_out(resolve(experiment), callbacks)


def carry_out(plan: Plan, callbacks: Sequence[RunCallback] = ()) -> Path:
    """Run (or resume) a plan, in which all settings are resolved, and write results.csv; returns the run's folder."""
    if not admission.is_already_finished(plan):
        play(plan, callbacks)
        write_results(results_folder(plan.experiment))
    return plan.folder


def play(plan: Plan, callbacks: Sequence[RunCallback] = ()) -> Path:
    """Run (or resume) a plan as one of many, whose row is only added to results.csv; returns the run's folder."""
    runtime = plan.experiment.run.runtime
    admission.check_machine(plan)
    if runtime == "deployment":
        return load(SEPARATE_MACHINES, "runtime")(plan, callbacks)
    admission.check_images(plan)
    if runtime == "flower":
        from fedsim.runtime.flower import run_with_flower

        run_with_flower(plan.experiment, len(plan.clients))
        return plan.folder
    started()
    grid = make_grid(plan, next((callback.note for callback in callbacks if hasattr(callback, "note")), logger.info))
    try:
        return serve(grid, plan, [*callbacks, *grid.run_callbacks()])
    finally:
        grid.close()


def make_grid(plan: Plan, say: Callable[[str], None] = logger.info) -> LocalGrid:
    """The grid of `run.runtime`, with one node per source client, or with several clients on each of many nodes.

    say: prints what the grid decides during the run
    """
    nodes = min(len(plan.clients), MOST_NODES)
    if plan.experiment.run.runtime == "ray":
        from fedsim.runtime.ray import RayGrid

        return RayGrid(nodes, plan.experiment.run)
    if plan.experiment.train.side_by_side > 1:
        from fedsim.runtime.together import TogetherGrid  # torch.func takes a third of a second to import

        return TogetherGrid(app, plan, nodes)
    return ForkedGrid(app, plan, nodes, say)
