"""The server app of a deployed run: fedsim's own, with the federation's keys as identities and its progress noted."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsim.apps.server import experiment_of, marked
from fedsim.common.files import atomic_write
from fedsim.deploy.expected import EXPECTED
from fedsim.deploy.federation import read_federation
from fedsim.deploy.progress import Progress
from fedsim.deploy.registry import Registry
from fedsim.runs.log_lines import LogLines
from fedsim.runs.plan import resolve
from fedsim.runs.serve import serve
from strategies.wire.grids import QuickGrid

app = ServerApp()


class BoundedGrid(QuickGrid):
    """A grid that tells the gate how large its replies may be."""

    def __init__(self, grid: Grid, kit: Path, run_id: int) -> None:
        super().__init__(grid)
        self._file = kit / EXPECTED / str(run_id)
        self.expect(self.largest_reply)

    def expect(self, size: int) -> None:
        """Keeps the size and writes it to the file that the gate reads."""
        super().expect(size)
        atomic_write(self._file, f"{size}\n")

    def close(self) -> None:
        """The run has ended."""
        self._file.unlink(missing_ok=True)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry point of a run that `fedsim run --runtime deployment` has submitted; runs next to the SuperLink."""
    with marked():
        plan = resolve(experiment_of(dict(context.run_config)))
        federation = plan.experiment.run.federation
        kit = read_federation(federation).kit("server")
        bounded = BoundedGrid(grid, kit, context.run_id)
        try:
            serve(bounded, plan, [LogLines(), Progress(federation, str(context.run_id))], Registry(kit).of_node)
        finally:
            bounded.close()
