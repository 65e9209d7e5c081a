"""The command that computes one run, and its bar: round, metrics and time left."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedsim.common.console import cut, errors, say
from fedsim.common.errors import UserError
from fedsim.common.tasks import SOURCE_TEST, UNDEFINED, Task, scores, task_in
from fedsim.settings.experiment import Experiment
from fedsim.settings.run import NO_TARGET

if TYPE_CHECKING:
    from fedsim.runs.plan import Plan


def run_one(experiment: Experiment) -> None:
    """Run (or resume) one experiment with a progress bar; then print its result and where the records are."""
    bar = ProgressBar()
    try:
        bar.begin(experiment)  # before PyTorch is imported, which takes longer than everything else until round 1
        from fedsim.runs import admission
        from fedsim.runs.plan import resolve
        from fedsim.runtime.launch import carry_out

        plan = resolve(experiment)
        was_finished = admission.is_already_finished(plan)
        if not was_finished:
            carry_out(plan, [bar])
    finally:
        bar.close()
    if was_finished:
        say_finished(plan)
    else:
        say(headline(plan.folder))
        say(f"next: {next_commands(plan)}")


def next_commands(plan: "Plan") -> str:
    """What one may do with a finished run: compare it, or use its model where it left no domain out."""
    from fedsim.runs.plan import results_folder

    if plan.experiment.run.target == NO_TARGET:
        return f"fedsim export {plan.folder}; fedsim evaluate {plan.folder} --data FOLDER_OR_TABLE"
    results = results_folder(plan.experiment)
    return f"fedsim compare {results}; fedsim report {results}"


def say_finished(plan: "Plan") -> None:
    """Print the result of a run that has finished before, and which settings come too late for it."""
    from fedsim.runs.conflicts import too_late
    from fedsim.runs.leftovers import tidy_finished
    from fedsim.runs.plan import results_folder

    folder = plan.folder
    result = headline(folder)  # a damaged record is said before anything else
    tidy_finished(results_folder(plan.experiment), [folder])
    say(f"already finished: {folder}\n{result}")
    if late := too_late([(folder, plan.experiment)]):
        say(late)


def headline(folder: Path) -> str:
    """One run's result in two lines, without the oracle.

    A further line says what the unseen domain leaves undefined, and with differential privacy one has its guarantee.
    """
    from fedsim.records.environment import read_environment
    from fedsim.records.readers import AGAIN
    from fedsim.records.reading import read_settings
    from fedsim.records.record_files import read_columns
    from fedsim.records.selection import DEFAULT_RULE, rule_title

    file = folder / "summary.csv"
    summary = read_columns(file)
    if not len(summary):
        raise UserError(f"{file} is empty or cut off; {AGAIN}")
    row = summary.row(0)
    task = task_in(summary.columns, "last_target_")
    basis = rule_title(DEFAULT_RULE, [read_settings(folder)])
    recorded = read_environment(folder)
    undefined = recorded.get("undefined", {}).get(str(row["target"]), "")
    place, quantity, title = f"on unseen {row['target']!s}", "target", task.title
    if row["target"] == NO_TARGET:
        place, quantity = "on all domains, of which none is unseen", "mean_validation"
        title = f"{task.title} in validation"
    lines = [
        f"{row['method']} {place} (seed {row['seed']:.0f}): "
        f"{_result(task, row, 'best_validation', quantity)} {title} "
        f"at round {row['best_validation_round']:.0f} ({basis}), "
        f"{_result(task, row, 'last', quantity)} at the last round",
        _source_test(task, row),
        f"{row['target']}: {undefined}" if undefined else "",
        recorded.get("privacy", ""),
        f"records: {folder}",
    ]
    return "\n".join(filter(None, lines))


def _source_test(task: Task, row: Mapping[str, Any]) -> str:
    """A line on the test images of the sources at the selected round; empty where there are none."""
    value = row.get(f"best_validation_mean_{SOURCE_TEST}{task.metric}")
    if value is None or math.isnan(float(value)):
        return ""
    return f"{task.text(float(value))} {task.title} on test images of the sources, which select nothing"


def _result(task: Task, row: Mapping[str, Any], rule: str, quantity: str) -> str:
    """The primary metric under a selection rule, in words; nan where no round is selected.

    quantity: "target" on the unseen domain, "mean_validation" on the validation examples of the sources
    """
    value = float(row[f"{rule}_{quantity}_{task.metric}"])
    return f"nan{task.unit}" if math.isnan(float(row[f"{rule}_round"])) else task.text(value)


# Letters next to a bar's name and the digits of its rounds: `━━━━━ / validation 100.0, target 100.0 % 1:00:00 left`
REST_OF_BAR = 53


class ProgressBar:
    """Callback that shows the progress of a run: round, primary metric in validation and on the target, time left.

    Until the run starts the bar is there on a terminal only, and leaves nothing behind where the run is refused.
    """

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(None, table_column=Column(max_width=40)),  # it takes the place that the others leave
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[scores]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[of_time]}"),
            console=errors,
            transient=True,
        )
        self._task: TaskID | None = None  # the only one

    def begin(self, experiment: Experiment) -> None:
        """Show the bar, of an experiment whose unseen domain may still be open."""
        rounds = experiment.train.rounds
        room = errors.width - REST_OF_BAR - 2 * len(str(rounds))
        name = f"{experiment.method_name} → {experiment.run.target or experiment.name}"
        seed = f" (seed {experiment.run.seed})"
        title = name + seed if len(name + seed) <= room else cut(name, max(room, 8))
        if self._task is None:
            self._task = self._progress.add_task(title, total=rounds, scores="starting", of_time="left")
            self._progress.start()
        self._progress.update(self._task, description=title)

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Show the bar with the run's unseen domain, from now on to its end."""
        self.begin(experiment)
        self._progress.live.transient = False

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Show the new round in the bar."""
        assert self._task is not None
        task = task_in(row)
        shown = [f"{name} {task.number(value)}" for name, value in scores(row)]
        text = ", ".join(shown)
        if shown and not text.endswith(UNDEFINED):
            text += task.unit
        self._progress.update(self._task, completed=row["round"], scores=text)
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
