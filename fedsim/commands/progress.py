"""The bar of a run: round, metrics and time left."""

from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedsim.common.console import cut, errors
from fedsim.common.tasks import scores
from fedsim.settings.experiment import Experiment

# Letters beside a bar's name and the digits of its rounds: `━━━━━ / validation 100.0, target 100.0 % 1:00:00 left`
REST_OF_BAR = 53


class ProgressBar:
    """Callback that shows the progress of a run: round, primary metric in validation and on the target, time left."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(None, table_column=Column(max_width=40)),  # it takes the place that the others leave
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[scores]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[of_time]}"),
            console=errors,
        )
        self._task = TaskID(0)  # the only one

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Show the bar."""
        rounds = experiment.train.rounds
        room = errors.width - REST_OF_BAR - 2 * len(str(rounds))
        name, seed = f"{experiment.method_name} → {experiment.run.target}", f" (seed {experiment.run.seed})"
        title = name + seed if len(name + seed) <= room else cut(name, max(room, 8))
        self._task = self._progress.add_task(title, total=rounds, scores="starting", of_time="left")
        self._progress.start()

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Show the new round in the bar."""
        shown = [f"{name} {100 * value:.1f}" for name, value in scores(row)]
        self._progress.update(self._task, completed=row["round"], scores=f"{', '.join(shown)} %" if shown else "")
        if self._progress.finished:  # the time is then that of the whole run
            self._progress.update(self._task, of_time="in all")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def on_end(self, summary: dict) -> None:
        """Stop the bar."""
        self.close()

    def close(self) -> None:
        """Stop the bar; a second call does nothing."""
        self._progress.stop()
