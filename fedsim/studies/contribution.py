"""What each source contributes: every run again without one of its sources, next to the run with all of them.

    contribution of source s to target t = metric on t with all sources - metric on t without s

It is positive where the source helps, also where a smaller metric is the better one. The runs with all sources are the
cells of a sweep with the same settings, so that neither is computed twice. The others are an experiment of their own,
`NAME-contribution`, because a comparison does not mix runs with different domains.
"""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from fedsim.analysis.statistics import mean_and_std, per_seed_average
from fedsim.common.console import console, say
from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.common.tables import MISSING, Column, Row, Table, csv_text
from fedsim.common.tables import Cell as TableCell
from fedsim.common.tasks import TASKS, Task
from fedsim.data import benchmark, unseen_domains
from fedsim.data.benchmarks import AVERAGE
from fedsim.records.selection import DEFAULT_RULE, rule_title
from fedsim.runs.plan import results_folder
from fedsim.settings.experiment import Experiment, read_experiment
from fedsim.settings.run import NO_TARGET
from fedsim.studies.axes import Axes
from fedsim.studies.budget import Budget
from fedsim.studies.grid import Grid, selected_on_target
from fedsim.studies.loop import carry_out
from fedsim.studies.plan import Cell, plan_cells, readers

FILE = "contribution.csv"
SUFFIX = "-contribution"  # of the experiment's name
FEWEST = 3  # domains: the unseen one, the source that is left out, and another source
ALL = "all sources"


class Run(NamedTuple):
    """Which run of a study a cell is; two cells that are compared are alike in it."""

    method: str
    target: str
    seed: int


class Contribution(Grid):
    """The cells with all sources, and by source those without it."""

    def __init__(self, cells: Sequence[Cell], without: dict[str, list[Cell]]) -> None:
        super().__init__([*cells, *(cell for others in without.values() for cell in others)])
        self.cells, self.without = list(cells), without
        data = cells[0].experiment.data
        self.task = TASKS[benchmark(data).task]

    def report(self) -> None:
        rows = self.rows()
        experiments = [cell.experiment for cell in self.cells]
        title = f"{experiments[0].name}: {rule_title(DEFAULT_RULE, experiments)}"
        for method in dict.fromkeys(row["method"] for row in rows):
            contribution_table(rows, method, self.task, f"{title}, {method}").show(console)
        file = results_folder(experiments[0]).with_name(experiments[0].name + SUFFIX) / FILE
        atomic_write(file, csv_text(list(rows[0]), rows))
        say(f"all numbers: {file}")

    def rows(self) -> list[dict]:
        """A row for each run and each source that it can lack, with the metric of both and their difference."""
        complete = {}
        for cell in self.cells:
            complete[run_of(cell.experiment)] = self.metric_of(cell)
        rows = []
        for source, cells in self.without.items():
            for cell in cells:
                run = run_of(cell.experiment)
                lacking = self.metric_of(cell)
                difference = self.task.upwards(complete[run] - lacking)
                values = {"complete": complete[run], "lacking": lacking, "contribution": difference}
                rows.append({**run._asdict(), "source": source, **values})
        return rows

    def metric_of(self, cell: Cell) -> float:
        """The task's metric on the unseen domain in the selected round; NaN for a cell without a result.

        The folder of a failed cell may hold a run with other settings.
        """
        value = selected_on_target(cell.folder, self.task) if cell.state == "finished" else None
        return math.nan if value is None else value


def run_of(experiment: Experiment) -> Run:
    """Which run of the study an experiment is, whichever of its sources it lacks."""
    return Run(experiment.method_name, experiment.run.target, experiment.run.seed)


def run_contribution(
    config: str,
    axes: Axes,
    budget: Budget,
    *,
    overrides: Sequence[str] = (),
    preset: str = "",
    dry_run: bool = False,
) -> list[Cell]:
    """Run the cells with all sources and those without one, then print the table; returns the failed cells.

    Raises UserError for wrong input, and where a run has one source alone.
    """
    base, shared = read_experiment(config, overrides, preset), readers()
    if NO_TARGET in (base.run.target, *axes.targets):
        raise UserError(f"contributions are measured on an unseen domain, and with run.target = {NO_TARGET!r} there is "
                        "none; name a domain")  # fmt: skip
    domains, selecting = benchmark(base.data).domains, base.run.validation_domain
    if len(domains) - bool(selecting) < FEWEST:
        raise UserError(f"without one source there is none left: {base.name} has the domains {', '.join(domains)}, of "
                        "which one is unseen; a contribution needs two sources")  # fmt: skip
    targets = unseen_domains(base.data) if list(axes.targets) == ["all"] else list(axes.targets)
    cells = plan_cells(config, axes, overrides, preset, shared)
    without = {}
    for source in domains:
        unseen = [target for target in targets if target != source]
        if source == selecting or not unseen:
            continue
        others = Axes(axes.methods, unseen, axes.seeds)
        changes = [*overrides, *settings_without(base, domains, source)]
        without[source] = plan_cells(config, others, changes, preset, shared)
    return carry_out(Contribution(cells, without), budget, dry_run)


def settings_without(base: Experiment, domains: Sequence[str], source: str) -> list[str]:
    """The overrides of the runs without a source: their domains, their experiment's name and their label."""
    label = ",".join(filter(None, (base.run.label, f"without={source}"))).replace("/", "_")
    values = {
        "data.domains": [domain for domain in domains if domain != source],
        "name": base.name + SUFFIX,
        "run.label": label,
    }
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


def contribution_table(rows: Sequence[dict], method: str, task: Task, title: str) -> Table:
    """The table of a method: a row for each source, a column for each unseen domain and for their average."""
    frame = pd.DataFrame(rows)
    frame = frame[frame["method"] == method]
    targets = sorted(set(frame["target"]))
    columns = [Column("Without", "left")]
    columns += [Column(name) for name in [*targets, AVERAGE]]
    digits = ".1f" if task.is_fraction else ".4g"
    complete = frame.drop_duplicates(["target", "seed"])
    cells = cells_of(complete, "complete", targets, task, f"{{:{digits}}}")
    lines = [Row([ALL, *cells])]
    for source, of_source in frame.groupby("source", sort=False):
        cells = cells_of(of_source, "contribution", targets, task, f"{{:+{digits}}}")
        lines.append(Row([str(source), *cells]))
    unit = "in points" if task.is_fraction else "in the unit of the target"
    notes = [
        f"{ALL}: {task.title} on the unseen domain. Below: how much of it is lost {unit} without a source; positive: "
        "the source helps. A run without a source also trains on fewer examples.",
        f"{AVERAGE}: over the unseen domains that are not the source itself; ±: sample deviation over seeds.",
    ]
    return Table(columns, lines, title=title, notes=notes, records=rows)


def cells_of(frame: pd.DataFrame, column: str, targets: Sequence[str], task: Task, form: str) -> list[TableCell]:
    """Mean and deviation over seeds of a column, for each target and for the average of those that are there."""
    grid = frame.pivot(index="seed", columns="target", values=column)
    series = [grid[target] if target in grid else pd.Series(dtype=float) for target in targets]
    series.append(per_seed_average(grid, [target for target in targets if target in grid]))
    return [text_of(values, form, 100 if task.is_fraction else 1) for values in series]


def text_of(values: pd.Series, form: str, factor: int) -> TableCell:
    """The cell of some values, which are shown times the factor: `+3.1 ± 0.4`, or a dash without any."""
    statistics = mean_and_std(values)
    mean = factor * statistics["mean"]
    deviation = factor * statistics["std"]
    if math.isnan(mean):
        return TableCell(MISSING)
    spread = ""
    if not math.isnan(deviation):
        spread = form.replace("+", "").format(deviation)
    return TableCell(form.format(mean), spread)
