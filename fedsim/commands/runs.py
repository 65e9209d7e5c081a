"""The command that computes one run."""

from pathlib import Path

from fedsim.commands.progress import ProgressBar
from fedsim.common.console import say
from fedsim.common.errors import UserError
from fedsim.common.tasks import task_in
from fedsim.settings.experiment import Experiment


def run_one(experiment: Experiment) -> None:
    """Run (or resume) one experiment with a progress bar; then print its result and where the records are."""
    from fedsim.runs import admission
    from fedsim.runs.conflicts import too_late
    from fedsim.runs.leftovers import tidy_finished
    from fedsim.runs.plan import resolve, results_folder
    from fedsim.runtime.launch import carry_out

    plan = resolve(experiment)
    folder = plan.folder
    if admission.is_already_finished(plan):
        result = headline(folder)  # a damaged record is said before anything else
        tidy_finished(results_folder(experiment), [folder])
        say(f"already finished: {folder}\n{result}")
        if late := too_late([(folder, plan.experiment)]):
            say(late)
    else:
        bar = ProgressBar()
        try:
            carry_out(plan, [bar])
        finally:
            bar.close()
        say(headline(folder))


def headline(folder: Path) -> str:
    """One run's result in two lines, without the oracle.

    With differential privacy, a third line has its guarantee; another line says when tables report another round.
    """
    from fedsim.records.environment import read_environment
    from fedsim.records.kept_model import other_round
    from fedsim.records.reading import read_settings
    from fedsim.records.record_files import AGAIN, read_record
    from fedsim.records.selection import DEFAULT_RULE, rule_title

    file = folder / "summary.csv"
    summary = read_record(file)
    if summary.empty:
        raise UserError(f"{file} is empty or cut off; {AGAIN}")
    row = summary.iloc[0]
    task = task_in(row.index, "last_target_")
    basis = rule_title(DEFAULT_RULE, [read_settings(folder)])
    other = other_round(folder)
    privacy = read_environment(folder).get("privacy", "")
    return (
        f"{row['method']} on unseen {row['target']!s} (seed {row['seed']}): "
        f"{100 * row[f'best_validation_target_{task.metric}']:.1f} % {task.title} "
        f"at round {row['best_validation_round']:.0f} ({basis}), "
        f"{100 * row[f'last_target_{task.metric}']:.1f} % at the last round\n"
        + (f"{privacy}\n" if privacy else "")
        + (f"{other}\n" if other else "")
        + f"records: {folder}"
    )
