"""The commands of the command line, one function each."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from fedsim.console import ProgressBar, console, errors, say
from fedsim.errors import UserError, nearest
from fedsim.experiment import Experiment
from fedsim.tasks import task_in

if TYPE_CHECKING:
    from fedsim.results import Runs


OWN_DATA = """\
folder: your own images, ROOT/DOMAIN/CLASS/IMAGE. Each folder in ROOT is a domain; the classes are the folders in it.
Write an experiment file, e.g. mine.toml, and run it with `fedsim run mine.toml --target DOMAIN`:

[data]
dataset = "folder"
root = "ROOT"
image_size = 224
augment = "domainbed"
normalize = "imagenet"

[model]
backbone = "resnet18"
weights = "imagenet"

[train]
rounds = 40
batch_size = 64
lr = 0.01
"""


def run_one(experiment: Experiment) -> None:
    """Run (or resume) one experiment with a progress bar; prints the headline and where the records are."""
    from fedsim.run.plan import resolve
    from fedsim.run.session import complete_finish, is_finished, refuse_other_settings
    from fedsim.runtime.launch import carry_out

    plan = resolve(experiment)
    folder, experiment = plan.folder, plan.experiment
    if is_finished(folder):
        refuse_other_settings(folder, experiment)
        complete_finish(experiment)
        say(f"already finished: {folder}")
    else:
        bar = ProgressBar()
        try:
            carry_out(plan, [bar])
        finally:
            bar.close()
    say(headline(folder))


def make_pictures(experiment: Experiment, output: Path, rows: int) -> None:
    """Write the picture grids of a method and print where they are."""
    from fedsim.results.pictures import draw_pictures
    from fedsim.run.plan import resolve

    for file in draw_pictures(resolve(experiment), output, rows):
        say(str(file))


def headline(folder: Path) -> str:
    """One run's result in two lines, without the oracle; with differential privacy, its guarantee in a third one."""
    row = pd.read_csv(folder / "summary.csv", dtype={"validation_domain": str}).iloc[0]
    task = task_in(row.index, "last_target_")
    basis = f"best on {row['validation_domain']}" if "validation_domain" in row else "best source validation"
    privacy = json.loads((folder / "environment.json").read_text()).get("privacy", "")
    return (
        f"{row['method']} on unseen {row['target']!s} (seed {row['seed']}): "
        f"{100 * row[f'best_validation_target_{task.metric}']:.1f} % {task.title} "
        f"at round {row['best_validation_round']:.0f} ({basis}), "
        f"{100 * row[f'last_target_{task.metric}']:.1f} % at the last round\n"
        + (f"{privacy}\n" if privacy else "")
        + f"records: {folder}"
    )


def show_methods(changes: str = "") -> None:
    """The map of methods by what they change, with cost, source and disclosure; `changes` selects slots."""
    from fedsim.method_list import listed, step_costs
    from fedsim.recipe import Recipe

    costs, measured = step_costs()
    plain = Recipe().disclosure()
    groups = listed(changes, costs)
    widest = max((len(row.name) for rows in groups.values() for row in rows), default=0)
    for group, rows in groups.items():
        columns = (
            Column("method", width=widest),
            Column("cost", justify="right", width=5),
            "changes; source; what it discloses",
        )
        title = escape(f"{group} ({len(rows)})")
        table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, expand=True)
        for row in rows:
            outside = "" if row.origin == "fedsim" else f"{row.origin}: "
            cost = "" if row.cost is None else f"{row.cost:.2f}"
            lines = [f"{outside}{row.changes}", row.recipe.paper]
            lines += [told] if (told := row.recipe.disclosure()) != plain else []
            table.add_row(*map(escape, (row.name, cost, "\n".join(lines))))
        console.print(table)
    if not groups:
        say(f"no method changes {changes}")
    if measured:
        say(f"cost: time of one local step divided by FedAvg's, empty where it was not measured ({measured})")
    say(f"disclosure: {plain}, where a method has no line of its own for it")
    say("combine rows with +, e.g. gperxan+fedprox; details: fedsim methods NAME; filter: --changes fuse,terms")


def show_method(name: str, data: str = "", preset: str = "", overrides: Sequence[str] = ()) -> None:
    """One recipe with every part, every field and what it discloses; with an experiment as `data`, its bytes per
    round."""
    from fedsim.assembly import find_recipe
    from fedsim.part import part_name
    from fedsim.recipe import parts_of

    recipe = find_recipe(name)
    table = Table("slot", "part", "settings", title=escape(f"{name}: {recipe.paper}"))
    for slot, part in parts_of(recipe):
        values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        fields = [f"method.{part_name(part)}.{key} = {value!r}" for key, value in values.items()]
        table.add_row(slot, part_name(part), escape("\n".join(fields)))
    console.print(table)
    say(f"discloses: {recipe.disclosure()}")
    if data:
        from fedsim.traffic_table import show_traffic

        show_traffic(name, data, preset, overrides)


def show_findings(method: str, overrides: Sequence[str] = ()) -> bool:
    """Prints one line per property of a method; returns whether all hold."""
    from fedsim.contract import findings

    logging.disable(logging.WARNING)  # warnings about the failures that the check makes on purpose
    holds = True
    try:
        for words, reason in findings(method, overrides):
            holds &= not reason
            mark, color = ("fails", "red") if reason else ("holds", "green")
            console.print(Text.assemble((mark, color), f"  {words}{': ' + reason if reason else ''}"), soft_wrap=True)
    finally:
        logging.disable(logging.NOTSET)
    return holds


def start_method(name: str, folder: Path) -> None:
    """Writes the files of a new method and prints what to do with them."""
    from fedsim.new_method import write_method

    for file in write_method(name, folder):
        console.print(str(file), soft_wrap=True)
    console.print(
        f"edit them in this folder; then: pytest test_{name}.py, fedsim check-method {name}:{name}, "
        f"fedsim run digits --method {name}:{name}",
        soft_wrap=True,
    )


def show_inspection(path: Path, grid: Path | None) -> None:
    """Counts, sizes and modes of a folder or table of images, and the problems found in it."""
    from fedsim.data.inspect import draw_grid, inspect

    found = inspect(path)
    for title, frame in (("images", found.counts.reset_index()), ("files", found.domains)):
        table = Table(*(escape(str(name)) for name in frame.columns), title=escape(f"{path}: {title}"))
        for row in frame.itertuples(index=False):
            table.add_row(*(escape(str(value)) for value in row))
        console.print(table)
    say("\n".join(found.problems) if found.problems else "no problem was found")
    if grid is not None:
        say(f"pictures: {draw_grid(found, grid)}")


def show_datasets(name: str) -> None:
    """The known data sets, or one with its domains, classes and counts."""
    from fedsim.data import BENCHMARKS
    from fedsim.experiment import config_folders
    from fedsim.sweep.tables import known_tables

    if name and name not in BENCHMARKS:
        raise UserError(f"unknown data set {name!r}; {nearest(name, BENCHMARKS)}known: {', '.join(BENCHMARKS)}")
    if name == "folder":
        print(OWN_DATA)
        return
    if name:
        bench = BENCHMARKS[name]
        table = Table("domain", "images", title=escape(f"{bench.title}: {len(bench.classes)} classes"))
        for domain in bench.domains:
            table.add_row(escape(domain), str(bench.counts[domain]) if bench.counts else "not checked")
        console.print(table)
        classes = "read from the data" if bench.discover else ", ".join(bench.classes)
        say(f"classes: {classes}\nsource: {bench.source}\n{bench.note}")
        return
    table = Table("data set", "domains", "classes", "images", title="fedsim datasets")
    for key, bench in BENCHMARKS.items():
        images = str(sum(bench.counts.values())) if bench.counts else "-"
        table.add_row(key, ", ".join(bench.domains), str(len(bench.classes)), images)
    console.print(table)
    configs = sorted({file.stem for folder in config_folders() for file in folder.glob("*.toml")})
    say(f"shipped experiments: {', '.join(configs)}")
    say(f"tables of papers, for `fedsim sweep tables/NAME`: {', '.join(known_tables())}")


def chosen_runs(folder: Path, methods: str, targets: str, seeds: str, only: Sequence[str] = ()) -> "Runs":
    """The finished runs of a folder, or of comma-separated methods, targets and seeds; UserError for unknown ones.

    only: the tables that the caller reads (default: all).
    """
    from fedsim.results import TABLES, choose_runs, read_runs

    words = [[word.strip() for word in text.split(",") if word.strip()] for text in (methods, targets, seeds)]
    if not all(word.isdigit() for word in words[2]):
        raise UserError(f"--seeds {seeds!r}: give whole numbers separated by commas, e.g. 0,1,2")
    return choose_runs(read_runs(folder, only=only or TABLES), words[0], words[1], [int(word) for word in words[2]])


def show_comparison(
    folder: Path, runs: "Runs", select: str, baseline: str, by: list[str], format: str, metric: str = ""
) -> None:
    """Prints the comparison of a folder's finished runs.

    The CSV form is also written to FOLDER/comparison.csv, or to comparison-METRIC.csv for another metric than the
    task's own.
    """
    from fedsim.files import atomic_write
    from fedsim.results import compare

    comparison = compare(runs, select, baseline or None, by, metric=metric)
    if format == "table":
        comparison.show(console)
        name = "comparison" if comparison.primary else f"comparison-{metric}"
        atomic_write(folder / f"{name}.csv", comparison.render("csv"))
    else:
        print(comparison.render(format))


def is_table(folder: Path) -> bool:
    """Whether a folder holds the runs of a paper's table."""
    from fedsim.sweep.tables import COPY

    return (folder / COPY).is_file()


def show_reproduction(folder: Path, runs: "Runs", select: str, format: str) -> None:
    """Prints our numbers beside those of the paper's table; the CSV form is also written to FOLDER/comparison.csv."""
    from fedsim.files import atomic_write
    from fedsim.sweep.reproduction import render, reproductions, show

    if format not in ("table", "csv", "markdown", "latex"):
        raise UserError(f"unknown format {format!r}; known: table, csv, markdown, latex")
    results = reproductions(folder, runs, select)
    if format == "table":
        show(results, console)
        atomic_write(folder / "comparison.csv", render(results, "csv"))
    else:
        print(render(results, format))


def draw_plots(folder: Path, runs: "Runs", select: str) -> None:
    """Draws all figures into FOLDER/plots and lists them."""
    from fedsim.results import plot_all
    from fedsim.results.fonts import fonts_for, missing_text
    from fedsim.results.plots import names_in

    files = plot_all(runs, folder / "plots", select)
    boxes = missing_text(fonts_for(names_in(runs))[1])
    if boxes:
        errors.print(boxes, soft_wrap=True, markup=False, highlight=False)
    for file in files:
        if file.suffix == ".png":
            say(f"{file} (and .svg)")


def make_report(folder: Path, runs: "Runs") -> None:
    """Write the HTML page."""
    from fedsim.results import write_report

    notes = method_notes(runs.experiments.values())
    say(f"report: {write_report(folder, notes, runs=runs)}")


def method_notes(experiments: Iterable[Experiment]) -> dict[str, dict[str, str]]:
    """Each method's paper and what its runs disclose, with the parts that these runs had."""
    from fedsim.assembly import build_recipe

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
