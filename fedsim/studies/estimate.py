"""The time that cells will take. It always follows from measurements: of finished rounds or of local steps."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table
from rich.text import Text

from fedsim.common.errors import UserError
from fedsim.data import benchmark, source_domains
from fedsim.methods.assembly import assemble
from fedsim.methods.listing import step_costs
from fedsim.methods.variants import method_label
from fedsim.records.record_files import read_record
from fedsim.runs.plan import Plan, resolve
from fedsim.runs.work import planned_work
from fedsim.settings.experiment import Experiment, parse_experiment
from fedsim.studies.plan import Cell, rounds_on_disk

FILE = Path(__file__).with_name("step_times.csv")
KEY = ("dataset", "backbone", "bottleneck", "image_size", "batch_size", "precision", "method")
STEP_SLOTS = ("objective", "update", "companions", "step", "terms", "augment", "norm", "inserts")
COLUMNS = (*KEY, "milliseconds", "machine", "threads", "torch")


def cell_table(cells: Sequence[Cell], width: int) -> Table:
    """Return a table of the cells, whose caption estimates their time from rounds that are already on disk.

    width: the number of cells that run at the same time; 0: not known
    """
    table = Table("cell", "state", "rounds")
    for cell in cells:
        cell.round = rounds_on_disk(cell)
        done = f"{cell.round}/" if cell.state == "waiting" and cell.round else ""
        table.add_row(Text(cell.title), cell.state, f"{done}{cell.experiment.train.rounds}")
    rates = measured_rates(cells)
    costs, _ = step_costs()
    guesses, reasons = guessed_rates(cells, rates, costs)
    seconds = time_left(cells, rates | guesses, width or 1)
    if seconds is None:
        table.caption = "no finished rounds to estimate the time from"
    else:
        measured = [f"{method} {rate:.2f} s" for method, rate in rates.items()]
        paces = [f"{', '.join(measured)} a round", *reasons]
        at_a_time = f"{width} at a time" if width else "one at a time, divide by what the cluster carries"
        table.caption = f"about {duration(seconds)} from finished rounds ({'; '.join(paces)}), {at_a_time}"
    return table


def measured_rates(cells: Sequence[Cell]) -> dict[str, float]:
    """Return the median seconds of a round of each method, over the rounds that the cells' folders already hold."""
    seconds: dict[str, list[float]] = {}
    for cell in cells:
        with contextlib.suppress(UserError):  # of a damaged file, which the cell's own run gives
            rounds = read_record(cell.folder / "rounds.csv")
            of_method = seconds.setdefault(cell.experiment.method_name, [])
            if "round_seconds" in rounds:
                of_method.extend(rounds["round_seconds"].iloc[1:].dropna())
    medians = {}
    for method, values in seconds.items():
        if values:
            medians[method] = float(pd.Series(values).median())
    return medians


def guessed_rates(
    cells: Sequence[Cell], rates: Mapping[str, float], costs: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """({method: seconds per round} of methods that still have rounds and no rate, a text about each of them).

    rates: seconds per round by method, as measured; costs: cost of a local step by method (`step_costs`).
    A round takes the mean of the measured seconds per unit of cost, times the method's cost; without a cost their mean.
    """
    if not rates:
        return {}, []
    unmeasured = [cell.experiment.method_name for cell in cells if cell.rounds_left]
    seconds_per_cost = [rate / costs[method] for method, rate in rates.items() if method in costs]
    measured = ", ".join(rates)
    if len(rates) > 1:
        measured = f"the mean of {measured}"
    guesses: dict[str, float] = {}
    reasons = []
    for method in dict.fromkeys(unmeasured):
        if method in rates:
            continue
        if seconds_per_cost and method in costs:
            guess = costs[method] * sum(seconds_per_cost) / len(seconds_per_cost)
            guesses[method] = guess
            reasons.append(f"{method} is not measured: {guess:.2f} s by the cost of its step")
        else:
            guesses[method] = sum(rates.values()) / len(rates)
            reasons.append(f"{method} is not measured: it is counted like {measured}")
    return guesses, reasons


def observed_rates(cells: Sequence[Cell]) -> dict[str, float]:
    """Return the mean seconds of a round of each method in this sweep, including the start of a worker."""
    seconds: dict[str, float] = {}
    rounds: dict[str, int] = {}
    for cell in cells:
        if cell.done_here:
            method = cell.experiment.method_name
            spent = seconds.get(method, 0.0)
            seconds[method] = spent + cell.updated - cell.started
            rounds[method] = rounds.get(method, 0) + cell.done_here
    return {method: seconds[method] / rounds[method] for method in rounds}


def time_left(cells: Sequence[Cell], rates: Mapping[str, float], width: int) -> float | None:
    """Return the seconds until all cells have ended when `width` of them run at a time; None without any rate.

    rates: seconds per round by method; a method that is not in it is given the mean of the others.
    """
    if not rates:
        return None
    mean = sum(rates.values()) / len(rates)
    work = [cell.rounds_left * rates.get(cell.experiment.method_name, mean) for cell in cells]
    return max(sum(work) / width, max(work, default=0.0))


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(frozen=True)
class Estimate:
    """The seconds that the remaining cells of one row will take; None when nothing was measured."""

    seconds: float | None
    source: str  # where the seconds come from, or why there are none
    cells: int = 0  # that remain


def step_key(experiment: Experiment) -> tuple[str, ...]:
    """The settings on which the time of a local step depends, in the form of step_times.csv."""
    return (
        experiment.data.dataset,
        experiment.model.backbone,
        str(experiment.model.bottleneck),
        str(experiment.data.image_size),
        str(experiment.train.batch_size),
        experiment.train.precision,
        method_label(experiment),
    )


@cache
def step_times() -> dict[tuple[str, ...], tuple[float, str]]:
    """{key: (seconds of a step, the machine that measured it)} from the file of `steps.py --table NAME --record`."""
    rows = pd.read_csv(FILE, dtype=str).to_dict("records")
    times = {}
    for row in rows:
        key = tuple(row[name] for name in KEY)
        seconds = float(row["milliseconds"]) / 1000
        threads = "1 thread" if row["threads"] == "1" else f"{row['threads']} threads"
        times[key] = (seconds, f"{row['machine']}, {threads}")
    return times


def step_time(experiment: Experiment) -> tuple[float, str] | None:
    """(seconds of a local step, the machine that measured it), or None.

    These are the seconds of the row itself when they were measured. Otherwise they are FedAvg's seconds in the same
    setting times the cost of the method's step as a multiple of FedAvg's, if the row has the method's step.
    FedAvg may then have been measured on another data set, because images of the same size take the same time.
    """
    key, times = step_key(experiment), step_times()
    if key in times:
        return times[key]
    cost = step_costs()[0].get(experiment.method_name)
    of_fedavg = _time_of_fedavg(key)
    if cost is None or of_fedavg is None or not _has_its_methods_step(experiment):
        return None
    seconds, machine = of_fedavg
    return seconds * cost, f"{machine}: FedAvg's, times the cost of the method"


def _time_of_fedavg(key: tuple[str, ...]) -> tuple[float, str] | None:
    """The time of FedAvg's step with the settings of a key, measured on the key's data set or on another one."""
    times = step_times()
    on_same_data = (*key[:-1], "fedavg")
    if on_same_data in times:
        return times[on_same_data]
    on_other_data = None
    for other, time in times.items():
        if other[1:] == on_same_data[1:]:
            on_other_data = time
    return on_other_data


def _has_its_methods_step(experiment: Experiment) -> bool:
    """Whether no setting changes the work of a step; weights, rates and other decimal numbers do not."""
    return _step_parts(experiment.method, experiment) == _step_parts({"name": experiment.method_name}, experiment)


def _step_parts(method: Mapping[str, Any], experiment: Experiment) -> list[tuple[type, dict[str, Any]]]:
    """The parts of a step, each with its fields except decimal numbers and tuples of them."""
    parts = []
    for slot, part in assemble(method, experiment.parts).pairs:
        if slot in STEP_SLOTS:
            fields = _without_decimals(dataclasses.asdict(part))
            parts.append((type(part), fields))
    return parts


def _without_decimals(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields whose values are neither decimal numbers nor tuples of them."""
    return {name: value for name, value in fields.items() if not _is_decimal(value)}


def _is_decimal(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(number, float) for number in value)
    return isinstance(value, float)


def row_estimate(cells: Sequence[Cell]) -> Estimate:
    """The time for the remaining cells of one row (a method with its settings, on several targets and seeds).

    It follows from the whole rounds in their folders, otherwise from measured local steps, which are without
    evaluation, aggregation and reading of data.
    """
    left = [cell for cell in cells if cell.rounds_left]
    if not left:
        return Estimate(0.0, "")
    rate = measured_rates(cells).get(left[0].experiment.method_name)
    if rate is not None:
        return Estimate(rate * sum(cell.rounds_left for cell in left), "finished rounds", len(left))
    measured = step_time(left[0].experiment)
    if measured is None:
        return Estimate(None, "not measured")
    seconds, machine = measured
    steps = 0.0
    for cell in left:
        of_cell = steps_left(cell)
        if of_cell is None:
            return Estimate(None, "steps not counted")
        steps += of_cell
    return Estimate(seconds * steps, f"local steps alone on {machine}", len(left))


def steps_left(cell: Cell) -> float | None:
    """Local steps over all clients that a cell still has to take; None when the numbers of images are not known."""
    rounds = cell.experiment.train.rounds
    counted = _steps(cell.experiment.replace(run={"seed": 0, "label": ""}).toml())
    if counted is None:
        return None
    prelude, every_round = counted
    return (prelude if cell.rounds_left == rounds else 0.0) + every_round * cell.rounds_left


@cache
def _steps(settings: str) -> tuple[float, float] | None:
    """(steps over all clients before the first round, steps in one round) of an experiment given as TOML text."""
    return planned_steps(resolve(parse_experiment(settings)))


def planned_steps(plan: Plan) -> tuple[float, float] | None:
    """(steps over all clients before the first round, steps in one round); None where they are not known before."""
    counts = training_counts(plan)
    # Whole batches are of another number of images than the steps that were measured.
    work = None if counts is None or plan.recipe.batches.whole else planned_work(plan, counts)
    return work and (float(work[0].steps), float(work[1].steps))


def training_counts(plan: Plan) -> list[int] | None:
    """The numbers of training images of every client by the data set's published counts; None when it has no counts.

    None also with `data.clients`, where the sizes of the domains say how many clients each has.

    The counts differ from those of the split by at most one image per class, which is enough for an estimate of time.
    """
    data, images = plan.experiment.data, benchmark(plan.experiment.data).counts
    if images is None or data.split == "lists" or data.clients:
        return None
    shares = []
    for domain in source_domains(data, plan.experiment.run.target):
        of_domain = images[domain] * data.fraction
        shares.append(of_domain / data.clients_per_domain)
    mean = float(np.mean(shares))
    counts = []
    for share in shares:
        mixed = (1 - data.mix) * share + data.mix * mean
        trained = math.floor(mixed) - int(data.holdout * mixed)
        counts += [trained] * data.clients_per_domain
    return [sum(counts)] if plan.recipe.pooled else counts
