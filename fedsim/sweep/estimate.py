"""The hours that cells will take. They always follow from measurements: of finished rounds or of local steps."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedsim.data import benchmark, source_domains
from fedsim.methods.assembly import assemble
from fedsim.methods.listing import step_costs
from fedsim.methods.variants import method_label
from fedsim.run.notes import planned_work
from fedsim.run.plan import Plan, resolve
from fedsim.settings.experiment import Experiment, parse_experiment
from fedsim.sweep.plan import Cell, measured_rates

FILE = Path(__file__).with_name("step_times.csv")
KEY = ("dataset", "backbone", "bottleneck", "image_size", "batch_size", "precision", "method")
STEP_SLOTS = ("objective", "update", "companions", "client", "terms", "augment", "norm", "inserts")
COLUMNS = (*KEY, "milliseconds", "machine", "threads", "torch")


@dataclass(frozen=True)
class Estimate:
    """The seconds that the remaining cells of one row will take; None when nothing was measured."""

    seconds: float | None
    source: str  # where the seconds come from, or why there are none


def step_key(experiment: Experiment) -> tuple[str, ...]:
    """The settings on which the time of a local step depends, in the form of step_times.csv."""
    model, data, train = experiment.model, experiment.data, experiment.train
    values = (data.dataset, model.backbone, model.bottleneck, data.image_size, train.batch_size, train.precision)
    return (*map(str, values), method_label(experiment))


@cache
def step_times() -> dict[tuple[str, ...], tuple[float, str]]:
    """{key: (seconds of a step, the machine that measured it)} from the file of `steps.py --table NAME --record`."""
    frame = pd.read_csv(FILE, dtype=str)
    return {
        tuple(row[name] for name in KEY): (
            float(row["milliseconds"]) / 1000,
            f"{row['machine']}, {row['threads']} {'thread' if row['threads'] == '1' else 'threads'}",
        )
        for row in frame.to_dict("records")
    }


def step_time(experiment: Experiment) -> tuple[float, str] | None:
    """(seconds of a local step, the machine that measured it), or None.

    These are the seconds of the row itself when they were measured. Otherwise they are FedAvg's seconds in the same
    setting times the cost of the method's step as a multiple of FedAvg's, if the row has the method's step.
    FedAvg may then have been measured on another data set, because images of the same size take the same time.
    """
    key, times = step_key(experiment), step_times()
    if key in times:
        return times[key]
    ratio = step_costs()[0].get(experiment.method_name) if _has_its_methods_step(experiment) else None
    plain = {other[1:-1]: time for other, time in times.items() if other[-1] == "fedavg"}
    plain |= {key[1:-1]: times[own]} if (own := (*key[:-1], "fedavg")) in times else {}
    if ratio is None or key[1:-1] not in plain:
        return None
    seconds, machine = plain[key[1:-1]]
    return seconds * ratio, f"{machine}: FedAvg's, times the cost of the method"


def _has_its_methods_step(experiment: Experiment) -> bool:
    """Whether no setting changes the work of a step; weights, rates and other decimal numbers do not."""
    return _step_parts(experiment.method, experiment) == _step_parts({"name": experiment.method_name}, experiment)


def _step_parts(method: Mapping[str, Any], experiment: Experiment) -> list[tuple[type, dict[str, Any]]]:
    """The parts of a step, each with its fields except decimal numbers and tuples of them."""
    parts = [part for slot, part in assemble(method, experiment.parts).pairs if slot in STEP_SLOTS]
    fields = [(type(part), dataclasses.asdict(part)) for part in parts]
    return [(kind, {name: value for name, value in own.items() if not _decimal(value)}) for kind, own in fields]


def _decimal(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, tuple) and all(isinstance(each, float) for each in value))


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
        return Estimate(rate * sum(cell.rounds_left for cell in left), "finished rounds")
    known = step_time(left[0].experiment)
    if known is None:
        return Estimate(None, "not measured")
    seconds, machine = known
    steps = [found for cell in left if (found := steps_left(cell)) is not None]
    if len(steps) < len(left):
        return Estimate(None, "steps not counted")
    return Estimate(seconds * sum(steps), f"local steps alone on {machine}")


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

    The counts differ from those of the split by at most one image per class, which is enough for an estimate of time.
    """
    data, images = plan.experiment.data, benchmark(plan.experiment.data).counts
    if images is None or data.split == "lists":
        return None
    sources = source_domains(data, plan.experiment.run.target)
    shares = [images[domain] * data.fraction / data.clients_per_domain for domain in sources]
    shares = [(1 - data.mix) * share + data.mix * float(np.mean(shares)) for share in shares]
    counts = [math.floor(share) - int(data.holdout * share) for share in shares for _ in range(data.clients_per_domain)]
    return [int(np.sum(counts))] if plan.recipe.pooled else counts
