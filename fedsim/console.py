"""What a person sees while a run goes on: one progress bar with round, accuracies and time left."""

from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedsim.experiment import Experiment

console = Console()
errors = Console(stderr=True)


class ProgressBar:
    """Callback that draws a run: round, validation and target accuracy, time left."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[scores]}"),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=errors,
        )
        self._task = None

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Open the bar."""
        title = f"{experiment.method_name} → {experiment.run.target} (seed {experiment.run.seed})"
        self._task = self._progress.add_task(title, total=experiment.train.rounds, scores="starting")
        self._progress.start()

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Move the bar."""
        validation = row["mean_validation_accuracy"]
        shown = "" if validation is None else f"validation {100 * validation:5.1f} %  "
        self._progress.update(
            self._task, completed=row["round"], scores=f"{shown}target {100 * row['target_accuracy']:5.1f} %"
        )

    def on_end(self, summary: dict) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Stop drawing; safe to call twice."""
        self._progress.stop()


class SweepView:
    """Live view of a sweep: a bar over all rounds with time left, and the cells that are running."""

    def __init__(self, cells: list) -> None:
        self._cells = cells
        self._open = [cell for cell in cells if cell.state == "waiting"]
        self._rounds = sum(cell.experiment.train.rounds for cell in cells if cell.state == "waiting")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds  left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=errors,
        )
        self._task = self._progress.add_task("sweep", total=self._rounds)
        self._live = Live(console=errors, refresh_per_second=4, transient=True, get_renderable=self._render)

    def __enter__(self) -> "SweepView":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        done = sum(cell.state == "finished" for cell in self._cells)
        failed = sum(cell.state == "failed" for cell in self._cells)
        errors.print(f"{done} of {len(self._cells)} cells finished" + (f", {failed} failed" if failed else ""))

    def update(self) -> None:
        """Move the bar to what the cells say; one line for each cell that has ended."""
        for cell in self._cells:
            if cell.state in ("finished", "failed") and cell in self._open:
                self._open.remove(cell)
                shown = (
                    f"{100 * cell.target_accuracy:.1f} % at the last round" if cell.target_accuracy is not None else ""
                )
                self._live.console.print(f"{cell.state}: {cell.title} {shown}", highlight=False)
        started = [cell for cell in self._cells if cell.round or cell.state == "failed"]
        self._progress.update(
            self._task,
            completed=sum(
                cell.experiment.train.rounds if cell.state in ("finished", "failed") else cell.round for cell in started
            ),
        )

    def _render(self) -> Group:
        table = Table("cell", "round", "target", box=None)
        for cell in self._cells:
            if cell.state == "running":
                accuracy = "" if cell.target_accuracy is None else f"{100 * cell.target_accuracy:.1f} %"
                table.add_row(cell.title, f"{cell.round}/{cell.experiment.train.rounds}", accuracy)
        states = [cell.state for cell in self._cells]
        counts = ", ".join(
            f"{states.count(name)} {name}" for name in ("finished", "running", "waiting", "failed") if name in states
        )
        return Group(self._progress, f"cells: {counts}", table)
