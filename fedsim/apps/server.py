"""Flower's ServerApp. It is the same in simulation and deployment."""

from fedsim.common.exit_codes import MENDABLE, explain, refuse_hidden_packages

refuse_hidden_packages()  # before the first import of `clients` or `strategies`

import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsim.common.errors import USER_ERROR, UserError
from fedsim.runs import admission
from fedsim.runs.leftovers import tidy_finished
from fedsim.runs.log_lines import LogLines
from fedsim.runs.plan import resolve, results_folder
from fedsim.runs.serve import serve
from fedsim.settings.experiment import Experiment, parse_experiment, read_experiment
from strategies.wire.grids import QuickGrid

# The settings that stand in a run config under a name of their own.
SETTINGS = {"method": "method.name", "target": "run.target", "output": "run.output"}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry point of `flwr run`."""
    with marked():
        experiment = experiment_of(dict(context.run_config))
        plan = resolve(experiment)
        admission.check_images(plan)
        serve(QuickGrid(grid), plan, [LogLines()])
        tidy_finished(results_folder(plan.experiment), [plan.folder])


@contextmanager
def marked() -> Iterator[None]:
    """Marks errors that a user can correct by a prefix of their text, because Flower keeps only the text of an error.

    An error of a disk or a file also names the machine, which may be another one than the user's.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{USER_ERROR}{error}") from None
    except OSError as error:
        if error.errno not in MENDABLE:
            raise
        text, _ = explain(error)
        machine = socket.gethostname()
        raise UserError(f"{USER_ERROR}the server {machine}: {text}") from None


def experiment_of(run_config: dict) -> Experiment:
    """Returns the experiment of Flower's flat run config.

    Its keys are `experiment` (path, name or TOML text), `method`, `target`, `seed`, `output` and `overrides` (one
    string of key=value words).
    """
    text = str(run_config.get("experiment") or "digits")
    overrides = shlex.split(str(run_config.get("overrides", "")))
    for key, name in SETTINGS.items():
        value = run_config.get(key)
        if value:
            overrides.append(f"{name}={value}")
    seed = run_config.get("seed", -1)
    if int(seed) >= 0:
        overrides.append(f"run.seed={seed}")
    read = parse_experiment if "\n" in text else read_experiment
    return read(text, overrides)
