"""The commands about finished runs: comparison, figures and report."""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.common.console import console, errors, say
from fedsim.common.errors import UserError
from fedsim.common.lists import names_of, numbers_of
from fedsim.settings.experiment import Experiment

if TYPE_CHECKING:
    from fedsim.results import Runs


def chosen_runs(folder: Path, methods: str, targets: str, seeds: str, only: Sequence[str] = ()) -> "Runs":
    """The finished runs of a folder, or only those of comma-separated methods, targets and seeds.

    only: the record files that the caller needs (default: all). Raises UserError for a name that no run has.
    """
    from fedsim.results import TABLES, choose_runs, read_runs

    wanted = names_of("--methods", methods), names_of("--targets", targets), numbers_of("--seeds", seeds)
    return choose_runs(read_runs(folder, only=only or TABLES), *wanted)


def show_comparison(
    folder: Path,
    runs: "Runs",
    select: str,
    baseline: str,
    by: list[str],
    format: str,
    metric: str = "",
    correction: str = "holm",
) -> None:
    """Print the comparison of a folder's finished runs.

    Under the default selection rule, the table of all runs is also written to FOLDER/comparison.csv. For another metric
    than the task's own the file is comparison-METRIC.csv. In the folder of a paper's table it is not.
    """
    from fedsim.common.files import atomic_write
    from fedsim.results import compare

    comparison = compare(runs, select, baseline or None, by, metric=metric, correction=correction)
    if format == "table":
        comparison.show(console)
        name = "comparison" if comparison.primary else f"comparison-{metric}"
        if is_whole(runs, select) and not is_table(folder):
            atomic_write(folder / f"{name}.csv", comparison.render("csv"))
    else:
        print(comparison.render(format))


def is_whole(runs: "Runs", select: str) -> bool:
    """Whether a table is the main one of its folder, whose files no other one replaces: all runs, the default rule."""
    from fedsim.results.selection import DEFAULT_RULE

    return not runs.only and select == DEFAULT_RULE


def is_table(folder: Path) -> bool:
    """Whether a folder holds the runs of a paper's table."""
    from fedsim.sweep.tables import COPY

    return (folder / COPY).is_file()


def show_reproduction(folder: Path, runs: "Runs", select: str, format: str) -> None:
    """Print our numbers beside those of the paper's table.

    The table of all runs under the default rule is also written to FOLDER/comparison.csv.
    """
    from fedsim.common.files import atomic_write
    from fedsim.sweep.reproduction import reproductions
    from fedsim.sweep.reproduction_texts import render, show

    if format not in ("table", "csv", "markdown", "latex"):
        raise UserError(f"unknown format {format!r}; known: table, csv, markdown, latex")
    results = reproductions(folder, runs, select)
    if format == "table":
        show(results, console)
        if is_whole(runs, select):
            atomic_write(folder / "comparison.csv", render(results, "csv"))
    else:
        print(render(results, format))


def draw_plots(folder: Path, runs: "Runs", select: str, by: list[str]) -> None:
    """Draw all figures, list them and say the remarks on their numbers.

    A part of the runs or another rule has a folder of its own, FOLDER/plots-part.
    """
    from fedsim.results import plot_all
    from fedsim.results.fonts import fonts_for, missing_text
    from fedsim.results.plots import by_experiment, names_in

    files = plot_all(runs, folder / ("plots" if is_whole(runs, select) else "plots-part"), select, by)
    boxes = missing_text(fonts_for(names_in(runs, by))[1])
    if boxes:
        errors.print(boxes, soft_wrap=True, markup=False, highlight=False)
    for file in files:
        if file.suffix == ".png":
            say(f"{file} (and .svg)")
    for _, found in by_experiment(runs, select, by).values():
        for note in [found.title, *found.notes] if found else []:
            say(note)


def make_report(folder: Path, runs: "Runs", by: list[str]) -> None:
    """Write the HTML page: report.html, or report-part.html for a part of the runs."""
    from fedsim.results import write_report

    notes = method_notes(runs.experiments.values())
    say(f"report: {write_report(folder, notes, runs=runs, by=by)}")


def method_notes(experiments: Iterable[Experiment]) -> dict[str, dict[str, str]]:
    """Each method's paper and what its runs disclose, with the parts that these runs had."""
    from fedsim.methods.assembly import build_recipe

    texts: dict[str, dict[str, list[str]]] = {}
    for experiment in experiments:
        with contextlib.suppress(UserError):  # the method does not exist any more, or its files are not on this machine
            recipe = build_recipe(experiment)
            own = texts.setdefault(experiment.method_name, {"paper": [], "discloses": []})
            own["paper"].append(recipe.paper)
            own["discloses"].append(recipe.disclosure())
    return {
        method: {key: " | ".join(dict.fromkeys(values)) for key, values in own.items()} for method, own in texts.items()
    }
