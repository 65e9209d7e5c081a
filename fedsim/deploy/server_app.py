"""The server app of a deployed run: fedsim's own, with the federation's keys as identities and its progress noted."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsim.deploy.progress import Progress
from fedsim.deploy.registry import identities
from fedsim.run.plan import resolve
from fedsim.server_app import LogLines, experiment_of, marked, serve
from strategies.wire.polling import QuickGrid

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry point of a run that `fedsim run --runtime deployment` has submitted; runs beside the SuperLink."""
    with marked():
        plan = resolve(experiment_of(dict(context.run_config)))
        federation = plan.experiment.run.federation
        serve(QuickGrid(grid), plan, [LogLines(), Progress(federation)], identities(federation))
