"""`run.doubt`: at the end of a run its sources fit a temperature and a threshold to their validation examples."""

import logging
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from safetensors.numpy import load_file

from fedsim.common.doubt import BINS, GRIDS, POINTS, fit_temperature, threshold_of
from fedsim.common.errors import UserError
from fedsim.common.tasks import TASKS
from fedsim.common.values import JsonTable, Row
from fedsim.data import Benchmark
from fedsim.methods.recipe import Recipe
from fedsim.models.infer.base import EvalMode
from fedsim.parts.part import part_name
from fedsim.records.doubt import DOUBTS, read_doubt
from fedsim.records.predictions import predictions_file, predictions_in
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import state_to_record
from strategies.fuse.private_mean import PrivateMean
from strategies.server import Server
from strategies.wire.doubt import Sums, sums_of_sources

DISCLOSED = (
    f"once, at the end: the slope of the validation loss at {GRIDS} x {POINTS} temperatures, and how many validation "
    f"examples have each of {BINS} scores (run.doubt)"
)

logger = logging.getLogger("fedsim")


def refuse_doubt(experiment: Experiment, recipe: Recipe, bench: Benchmark) -> None:
    """Raises UserError where `run.doubt` cannot be fitted to what this run predicts."""
    if not experiment.run.doubt:
        return
    reason = ""
    if not TASKS[bench.task].has_classes:
        reason = f"it makes sets of classes, and the task here is {bench.task}"
    elif isinstance(recipe.fuse, PrivateMean):
        reason = "its sums would leave the clients without the noise of private_mean"
    elif not (recipe.infer.on_sources or isinstance(recipe.infer, EvalMode)):
        reason = f"{part_name(recipe.infer)} predicts on the unseen domain in another way than on the sources"
    if reason:
        raise UserError(f"run.doubt: {reason}; leave it at 0")


def fit_doubt(server: Server, grid: Grid, folder: Path, round: int) -> JsonTable:
    """Returns what is recorded of the doubt of the model in `best.safetensors`; empty where no client could answer.

    It is empty, too, where a client answered some of the questions about the temperature alone. Clients that did not
    answer are recorded as `missing`.

    round: the last round, as whose further phase the clients are asked
    """
    file = folder / "best.safetensors"
    alpha = server.experiment.run.doubt
    if not file.is_file():
        logger.warning("run.doubt: no round was selected, so that nothing is fitted")
        return {}
    model: ArrayRecord = state_to_record(load_file(file))
    server.exchange.begin(round)
    answered: list[set[str]] = []  # the clients that gave slopes, of each grid

    def slopes_at(temperatures: np.ndarray) -> np.ndarray:
        """Returns the slopes of the validation loss at these temperatures, summed over the clients."""
        replies = sums_of_sources(server, grid, model, {"temperatures": temperatures.tolist()})
        answered.append(set(replies))
        return _summed(replies, "slopes", np.zeros(len(temperatures)))

    temperature = fit_temperature(slopes_at)
    if not _are_alike(answered):
        logger.warning("run.doubt: not all questions were answered by the same clients, so that nothing is fitted")
        return {}
    replies = sums_of_sources(server, grid, model, {"temperature": temperature})
    counts = _summed(replies, "counts", np.zeros(BINS, np.int64))
    if not counts.sum():
        logger.warning("run.doubt: no client answered, so that nothing is fitted")
        return {}
    examples = {client: count for client, (_, count) in replies.items()}
    record: JsonTable = {
        "alpha": alpha,
        "temperature": temperature,
        "threshold": threshold_of(counts, alpha),
        "examples": examples,
    }
    missing = _without(server, answered[0] & replies.keys())
    if missing:
        record["missing"] = missing
    return record


def _summed(replies: dict[str, Sums], name: str, total: np.ndarray) -> np.ndarray:
    """Returns the sums of this name of all clients, added to `total`."""
    for sums, _ in replies.values():
        total = total + sums[name]
    return total


def _without(server: Server, answered: set[str]) -> list[str]:
    """Returns the clients that did not answer all questions, and logs their names."""
    missing = [client for client in server.exchange.clients if client not in answered]
    if missing:
        logger.warning("run.doubt: it is fitted without %s, which did not answer", ", ".join(missing))
    return missing


def _are_alike(answered: list[set[str]]) -> bool:
    """Returns whether the same clients answered each grid: the next one lies where the slope of these is 0."""
    first = answered[0]
    return bool(first) and all(clients == first for clients in answered)


def doubt_columns(folder: Path, round: int | None) -> Row:
    """Returns the columns of summary.csv about the doubt of `best.safetensors` on the unseen domain.

    They are empty without predictions.

    round: that of best_validation
    """
    doubt = read_doubt(folder)
    if doubt is None or round is None:
        return {}
    file = predictions_file(folder, round)
    if not file.is_file():
        return {}
    content = predictions_in(file), doubt
    return {f"target_{name}": measure(content) for name, measure in DOUBTS.items()}
