"""The commands about finished runs: comparison, figures and report."""

import contextlib
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsim.common.console import console, errors, say
from fedsim.common.errors import UserError, printable
from fedsim.common.files import atomic_write, is_archive, write_figure
from fedsim.common.lists import names_of, numbers_of
from fedsim.export.cli import Trust
from fedsim.settings.experiment import Experiment

if TYPE_CHECKING:
    from markupsafe import Markup

    from fedsim.records import Runs

METRIC_HELP = "balanced_accuracy, macro_f1, auroc, ece (calibration error), surface_distance; default: accuracy or dice"
CLOCK_HELP = "accuracy over hours on other machines: profiles.toml, hospitals-fibre, clinics-dsl or phones-lte"
FIGURE_HELP = "of several data sets: draw the mean ranks; with --clock: accuracy over hours; PNG or SVG"
RECORDS_OF_ROUNDS = ["summary", "rounds", "clients"]  # without a clock and the rule `worst` the first one is enough
OfMetric = Annotated[str, typer.Option("--metric", help=METRIC_HELP)]
OfCorrection = Annotated[str, typer.Option("--correction", help="corrects p for testing several methods: holm or none")]
OfFigure = Annotated[Path | None, typer.Option("--figure", help=FIGURE_HELP)]
OfClock = Annotated[str, typer.Option("--clock", help=CLOCK_HELP)]
By = Annotated[list[str] | None, typer.Option(help="setting in which the runs may differ (repeatable)")]
OnlyMethods = Annotated[str, typer.Option("--methods", help="only these methods, comma-separated (default: all)")]
OnlyTargets = Annotated[str, typer.Option("--targets", help="only these unseen domains (default: all)")]
OnlySeeds = Annotated[str, typer.Option("--seeds", help="only these seeds (default: all)")]


def compare(
    folders: Annotated[
        list[Path], typer.Argument(help="results, e.g. outputs/digits or digits.zip, or several data sets")
    ],
    select: Annotated[str, typer.Option(help="best_validation, last, oracle, or worst: of the worst source")] = (
        "best_validation"
    ),
    baseline: Annotated[str, typer.Option(help="the method with which the others are compared in tests")] = "",
    by: By = None,
    format: Annotated[str, typer.Option(help="table, csv, markdown or latex")] = "table",
    metric: OfMetric = "",
    correction: OfCorrection = "holm",
    published: Annotated[Path | None, typer.Option(help="numbers of more papers, a CSV file like ours")] = None,
    figure: OfFigure = None,
    clock: OfClock = "",
    methods: OnlyMethods = "",
    targets: OnlyTargets = "",
    seeds: OnlySeeds = "",
    trust: Trust = False,
) -> None:
    """Compare finished runs: mean ± std over seeds per unseen domain, ranks, tests, cost, published numbers.

    In the folder of a paper's table it shows our numbers next to those of the paper, with the difference. With several
    folders it shows one column per data set, and tests of all pairs of methods over the unseen domains of all of them.
    """
    needed = needed_records(select, clock)
    parts = {folder: chosen_runs(folder, methods, targets, seeds, only=needed) for folder in folders}
    folder, runs = next(iter(parts.items()))
    if clock:
        refuse_beside_clock(len(parts), select, metric, baseline, published)
        show_clock(runs, clock, select, by or [], format, figure)
    elif len(parts) > 1:
        if by or published:
            raise UserError("--by and --published are for one folder: compare each data set by itself")
        show_across(parts, select, baseline, format, metric, correction, figure)
    elif figure:
        raise UserError("--figure draws the mean ranks over several data sets; give their folders, or use fedsim plot")
    elif is_table(runs.folder) and not (baseline or by or published) and metric in ("", "accuracy"):
        show_reproduction(folder, runs, select, format, trust)
    else:
        show_comparison(folder, runs, select, baseline, by or [], format, metric, correction, published)


def plot(
    folder: Annotated[Path, typer.Argument(help="results, e.g. outputs/digits or digits.zip")],
    select: Annotated[str, typer.Option(help="best_validation, last or oracle")] = "best_validation",
    by: By = None,
    methods: OnlyMethods = "",
    targets: OnlyTargets = "",
    seeds: OnlySeeds = "",
    layer: Annotated[
        list[str] | None,
        typer.Option(help="a layer or tensor of details.csv: what is recorded of it, by client over the rounds"),
    ] = None,
) -> None:
    """Draw all figures that the records allow, as PNG and SVG, into FOLDER/plots.

    Figures of a part of the runs or of another rule of selection go into FOLDER/plots-part. Those of NAME.zip go into
    the folder NAME next to it.
    """
    from fedsim.analysis.fonts import fonts_for, missing_text
    from fedsim.analysis.plots import by_experiment, first_to_open, names_in, plot_all

    runs, by = chosen_runs(folder, methods, targets, seeds), by or []
    files = plot_all(
        runs, results_of(folder) / ("plots" if is_whole(runs, select) else "plots-part"), select, by, layer or []
    )
    boxes = missing_text(fonts_for(names_in(runs, by))[1])
    if boxes:
        errors.print(boxes, soft_wrap=True, markup=False, highlight=False)
    for file in files:
        if file.suffix == ".png":
            say(f"{file} (and .svg)")
    for _, experiments in by_experiment(runs, select, by).values():
        for note in [experiments.title, *experiments.notes] if experiments else []:
            say(note)
    say(first_to_open(files))


def report(
    folder: Annotated[Path, typer.Argument(help="one experiment, e.g. outputs/digits or digits.zip")],
    by: By = None,
    live: Annotated[bool, typer.Option("--live", help="serve the page on this machine while runs go on")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="with --live: its port (default: a free one)")] = 0,
    federation: Annotated[Path | None, typer.Option(help="with --live: the federation file, to show its sites")] = None,
    methods: OnlyMethods = "",
    targets: OnlyTargets = "",
    seeds: OnlySeeds = "",
    trust: Trust = False,
) -> None:
    """Write one self-contained HTML page that answers when it is touched.

    Its tables sort and filter, its charts follow the table, and every cell leads to its run. With --live the page also
    shows which cells run, wait or have failed, when the sweep will end, and the sites of a federation. Ctrl-C stops it.
    The page of NAME.zip goes into the folder NAME next to it.
    """
    from fedsim.analysis.report import report_page, write_report

    if not live:
        if port or federation:
            raise UserError("--port and --federation belong to --live")
        runs = chosen_runs(folder, methods, targets, seeds)
        notes = method_notes(runs.experiments.values(), trust)
        say(f"report: {write_report(results_of(folder), notes, runs, by or [])}")
        return
    if is_archive(folder):
        raise UserError(f"--live is for a folder in which runs go on; without it: fedsim report {folder}")
    from fedsim.commands.live import serve_live

    def page(state: "Markup") -> str:
        runs = chosen_runs(folder, methods, targets, seeds)
        return report_page(runs, method_notes(runs.experiments.values(), trust), by=by or [], live=state)

    serve_live(folder, page, port, federation)


def archive(
    folder: Annotated[Path, typer.Argument(help="folder of results, e.g. outputs/digits")],
    output: Annotated[Path | None, typer.Option(help="the archive (default: FOLDER.zip)")] = None,
) -> None:
    """Write the records of finished runs into one file, which compare, plot and report read like the folder.

    It has settings, environments and tables of numbers, without this machine's folders. Models, predictions and
    pictures are not in it.
    """
    from fedsim.records.archive import write_archive
    from fedsim.records.reading import finished_runs

    if output and not is_archive(output):
        raise UserError(f"--output {output}: an archive is a file NAME.zip")
    runs = finished_runs(folder)
    named = folder.resolve() if folder.name in ("", "..") else folder
    file = output or named.with_name(f"{named.name}.zip")
    write_archive(folder, runs, file)
    say(f"{file}: {len(runs)} run{'s' if len(runs) > 1 else ''}; fedsim compare {shlex.quote(str(file))}")


def results_of(path: Path) -> Path:
    """Return the folder into which figures and reports go: that of the results, or one with an archive's name."""
    return path.with_suffix("") if is_archive(path) else path


def chosen_runs(folder: Path, methods: str, targets: str, seeds: str, only: Sequence[str] = ()) -> "Runs":
    """The finished runs of a folder or an archive, or only those of comma-separated methods, targets and seeds.

    only: the record files that the caller needs (default: all). Raises UserError for a name that no run has.
    """
    from fedsim.records import TABLES, choose_runs, read_runs

    chosen = names_of("--methods", methods), names_of("--targets", targets), numbers_of("--seeds", seeds)
    return choose_runs(read_runs(folder, only=only or TABLES), *chosen)


def show_comparison(
    folder: Path,
    runs: "Runs",
    select: str,
    baseline: str,
    by: list[str],
    format: str,
    metric: str = "",
    correction: str = "holm",
    published: Path | None = None,
) -> None:
    """Print the comparison of a folder's finished runs.

    Under the default selection rule, the table of all runs is also written to FOLDER/comparison.csv. For another metric
    than the task's own the file is comparison-METRIC.csv. In the folder of a paper's table it is not, nor next to
    an archive.
    """
    from fedsim.analysis import compare

    comparison = compare(runs, select, baseline or None, by, published or True, metric, correction)
    if format == "table":
        comparison.show(console)
        name = "comparison" if comparison.is_primary else f"comparison-{metric}"
        if is_whole(runs, select) and not (published or is_archive(folder) or is_table(folder)):
            atomic_write(folder / f"{name}.csv", comparison.render("csv"))
    else:
        print(comparison.render(format))


def needed_records(select: str, clock: str) -> list[str]:
    """The record files that a comparison reads: those of rounds and clients only where it looks at single rounds."""
    from fedsim.records.selection import WORST_SOURCE

    return RECORDS_OF_ROUNDS if clock or select == WORST_SOURCE else RECORDS_OF_ROUNDS[:1]


def refuse_beside_clock(folders: int, select: str, metric: str, baseline: str, published: Path | None) -> None:
    """Raise UserError for what `--clock` does not go together with."""
    from fedsim.records.selection import WORST_SOURCE

    if folders > 1 or select == WORST_SOURCE or metric or baseline or published:
        raise UserError(
            "--clock is for one folder, the task's own metric and a rule of runs, and it makes no tests: leave the "
            "rest out"
        )


def show_clock(runs: "Runs", source: str, select: str, by: list[str], format: str, figure: Path | None) -> None:
    """Print what a folder's runs would have taken on the machines of a clock, and draw the figure where asked."""
    from fedsim.analysis import compare
    from fedsim.analysis.clock import clock, read_profiles
    from fedsim.analysis.comparison import FORMATS
    from fedsim.common.tables import show_tables

    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    profiles = read_profiles(source)
    made = clock(runs, compare(runs, select, by=by, published=False), profiles)
    table = made.table()
    if format == "table":
        show_tables([table], table.notes, console)
    else:
        print({"csv": table.csv, "markdown": table.markdown, "latex": table.latex}[format]())
    if figure:
        from fedsim.analysis.figure_style import look

        with look(made.comparison.labels.values()):
            write_figure(made.figure(), figure, dpi=150, facecolor="white", bbox_inches="tight")
        errors.print(f"{figure}", soft_wrap=True, highlight=False)


def show_across(
    parts: "dict[Path, Runs]",
    select: str,
    baseline: str,
    format: str,
    metric: str,
    correction: str,
    figure: Path | None,
) -> None:
    """Print the table of several data sets and the tests of all pairs; draw the figure of mean ranks where asked."""
    from fedsim.analysis import compare
    from fedsim.analysis.across import across, notes_on, pairs, refuse_one_data_set

    named = [" and ".join(dict.fromkeys(one.name for one in runs.experiments.values())) for runs in parts.values()]
    names = named if len(set(named)) == len(named) else list(map(str, parts))
    refuse_one_data_set(dict(zip(names, parts.values())))
    compared = {
        name: compare(runs, select, published=False, metric=metric) for name, runs in zip(names, parts.values())
    }
    comparison, tests = across(compared, baseline or None, correction), pairs(compared)
    comparison.notes += notes_on(tests)
    if format == "table":
        comparison.show(console)
    else:
        print(comparison.render(format))
    if figure:
        from fedsim.analysis.comparison_figures import critical_figure
        from fedsim.analysis.figure_style import look

        with look([*names, *tests.ranks.index]):
            drawn = critical_figure(tests, ", ".join(names))
            write_figure(drawn, figure, dpi=150, facecolor="white", bbox_inches="tight")
        atomic_write(figure.with_suffix(".csv"), printable(tests.tests.to_csv(index=False)))
        errors.print(f"{figure}, and all pairs in {figure.with_suffix('.csv')}", soft_wrap=True, highlight=False)


def is_whole(runs: "Runs", select: str) -> bool:
    """Whether a table is the main one of its folder, whose files no other one replaces: all runs, the default rule."""
    from fedsim.records.selection import DEFAULT_RULE

    return not runs.only and select == DEFAULT_RULE


def is_table(folder: Path) -> bool:
    """Whether a folder holds the runs of a paper's table."""
    from fedsim.studies.tables import COPY

    return (folder / COPY).is_file()


def show_reproduction(folder: Path, runs: "Runs", select: str, format: str, trust: bool = False) -> None:
    """Print our numbers next to those of the paper's table.

    The table of all runs under the default rule is also written to FOLDER/comparison.csv.
    """
    from fedsim.studies.reproduction import render, reproductions, show

    if format not in ("table", "csv", "markdown", "latex"):
        raise UserError(f"unknown format {format!r}; known: table, csv, markdown, latex")
    results = reproductions(runs.folder, runs, select, trust)
    if format == "table":
        show(results, console)
        if is_whole(runs, select) and not is_archive(folder):
            atomic_write(folder / "comparison.csv", render(results, "csv"))
    else:
        print(render(results, format))


def method_notes(experiments: Iterable[Experiment], trust: bool = False) -> dict[str, dict[str, str]]:
    """Each method's group, its idea, its paper and what its runs disclose, with the parts that these runs had.

    Without trust a method that is made of modules outside fedsim is left out, because they would have to be imported.
    """
    from fedsim.methods.assembly import assemble
    from fedsim.methods.groups import ideas_of, printed_name
    from fedsim.methods.listing import MethodRow
    from fedsim.methods.registry import refuse_outside

    texts: dict[str, dict[str, list[str]]] = {}
    for experiment in experiments:
        method = Experiment(method=experiment.method, parts=experiment.parts)  # data and network say nothing about it
        with contextlib.suppress(UserError):  # the method does not exist any more, or is not trusted
            refuse_outside(method, experiment.name, trust)
            recipe = assemble(method.method, method.parts)
            described = texts.setdefault(
                experiment.method_name, {"group": [], "name": [], "idea": [], "paper": [], "discloses": []}
            )
            described["group"].append(MethodRow(experiment.method_name, recipe, "", None).group)
            described["name"].append(printed_name(experiment.method_name))
            described["idea"] += ideas_of(experiment.method_name)
            described["paper"].append(recipe.paper)
            described["discloses"].append(recipe.disclosure())
    return {
        method: {key: " | ".join(dict.fromkeys(values)) for key, values in values_of.items()}
        for method, values_of in texts.items()
    }
