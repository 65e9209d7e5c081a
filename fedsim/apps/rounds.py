"""The rounds of an app whose clients know nothing of fedsim: they are those of `FedDG`, with and without records."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from safetensors.numpy import load_file
from torch import nn

from fedsim.models.tasks import TaskRules, rules_of
from fedsim.runs import admission
from fedsim.runs.plan import Plan
from fedsim.runs.serve import recorded
from fedsim.runs.session import Session
from fedsim.runs.workspace import pick_device
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.kinds import Kind, nonnegative_names, tensor_kinds
from strategies.base import Evaluate, FedDG, Sink
from strategies.model import ServerModel
from strategies.parts import Arrays, Entries, Place
from strategies.recipe import ServerRecipe
from strategies.round import RoundResult
from strategies.wire.grids import PatientGrid
from strategies.wire.handshake import OpenRoster
from strategies.wire.own_apps import AppGrid, means_of
from strategies.wire.target_site import TargetScore

logger = logging.getLogger("flwr.fedsim")  # by Flower's handler; a run of fedsim silences Flower's own lines
logger.setLevel(logging.INFO)


@dataclass
class AppSpace:
    """What records and server parts take from an app's run: its plan, and facts of the tensors that travel.

    net: the module of these tensors; None where only the tensors are known
    arrays: the initial model
    """

    plan: Plan
    net: nn.Module | None
    arrays: ArrayRecord

    def __post_init__(self) -> None:
        self.experiment, self.recipe = self.plan.experiment, self.plan.recipe
        self.task: TaskRules = rules_of(self.plan.data.task, self.experiment.data, self.experiment.train)
        self.device: torch.device = pick_device(self.experiment.run.device)
        self.places: dict[str, Place] = dict.fromkeys(self.arrays, "shared")

    def initial_arrays(self) -> ArrayRecord:
        """The initial model."""
        return self.arrays

    def frozen_record(self) -> dict[str, str]:
        """Empty: everything travels."""
        return {}

    def server_model(self) -> ServerModel:
        """What the server's parts may know of the tensors. Without their module every float tensor is a parameter."""
        if self.net is None:
            floats = {name for name, array in self.arrays.items() if array.dtype.startswith("float")}
            kinds = {name: Kind.WEIGHT if name in floats else Kind.COUNTER for name in self.arrays}
            return ServerModel(kinds, frozenset(floats), device=self.device)
        parameters = {name for name, _ in self.net.named_parameters(remove_duplicate=False)}
        names = frozenset(parameters & self.places.keys())
        return ServerModel(tensor_kinds(self.net), names, nonnegative_names(self.net), device=self.device)


class Rounds:
    """The rounds of an app's run. They are those of `FedDG`, with the clients of a roster."""

    def __init__(self, space: AppSpace, nodes: AppGrid, roster: OpenRoster, validates: bool) -> None:
        self.space, self.nodes = space, nodes
        experiment = space.experiment
        recipe: ServerRecipe = space.recipe
        self.strategy = FedDG(recipe, experiment, space.places, roster.run_config, space.task.metric)
        server = self.strategy.server
        server.parts.model = space.server_model()
        server.exchange.join(roster)
        server.exchange.measured, server.exchange.validates = (), validates
        nodes.state = server.state
        self.metrics = Metrics(experiment.train.rounds)
        self.strategy.sinks.append(self.metrics)

    def play(self, arrays: ArrayRecord, rounds: int, evaluate_fn: Evaluate | None) -> Result:
        """Plays so many rounds; returns the last model and the metrics."""
        run, server = self.space.experiment.run, self.strategy.server
        grid = PatientGrid(self.nodes, server.exchange, run.patience)
        with closing(server.storage):
            result = self.strategy.start(grid, arrays, rounds, run.timeout, evaluate_fn=evaluate_fn)
        self.metrics.add_to(result)
        return result

    def play_recorded(self, evaluate_fn: Evaluate | None, tested: int | None) -> Result:
        """Plays the rounds that are left, with records and checkpoints; returns the last model and the metrics.

        tested: the examples of the unseen domain, where the server has them
        """
        plan, rounds = self.space.plan, self.space.experiment.train.rounds
        if not admission.is_already_finished(plan):
            with recorded(plan, ()) as (callbacks, check):
                session = Session(self.space, callbacks, check)
                session.attach(self.strategy)
                session.target_images = tested
                left = rounds - max(self.strategy.finished_rounds, 0)
                result = self.play(session.initial_arrays(), left, evaluate_fn)
                session.finish()
            return result
        logger.info("fedsim: already finished: %s", plan.folder)
        return Result(arrays=state_to_record(load_file(plan.folder / "last.safetensors")))


NOT_SHOWN = ("bytes_", "examples", "evaluation_seconds", "validation_examples", "images")  # beginnings of columns


class Metrics(Sink):
    """Logs each round as Flower's own strategies do, and keeps what Flower's Result says of it.

    names: the user's own names of tensors, by ours, for evaluate_fn; where he has none, tensors have his names already
    """

    def __init__(
        self, rounds: int, names: Mapping[str, str] | None = None, evaluate_fn: Evaluate | None = None
    ) -> None:
        self.rounds, self.names, self.evaluate = rounds, names or {}, evaluate_fn
        self.of_training: dict[int, MetricRecord] = {}
        self.of_validation: dict[int, MetricRecord] = {}
        self.of_target: dict[int, MetricRecord] = {}

    def begin_round(self, number: int) -> None:
        """Logs the number of the round."""
        if number:
            logger.info("[ROUND %d/%d]", number, self.rounds)

    def end_round(self, result: RoundResult) -> None:
        """Logs and keeps the means over the clients, and the score on the unseen domain."""
        rows, number, target = result.notes.clients, result.number, result.target
        columns = dict.fromkeys(name for row in rows.values() for name in row)
        shown = [name for name in columns if not name.startswith(NOT_SHOWN)]
        if number:
            self.of_training[number] = means_of(rows, [name for name in shown if not name.startswith("validation_")])
            self.of_validation[number] = means_of(rows, [name for name in shown if name.startswith("validation_")])
            logger.info("\t clients: %s", {**self.of_training[number], **self.of_validation[number]})
        of_target: dict[str, Any] = {}
        if target.value is not None:
            of_target = {"accuracy": target.value, "loss": float(target.loss or 0.0)}
            logger.info("\t unseen domain: %s", of_target)
        if self.evaluate:
            of_target |= self.evaluate(number, renamed(record_to_arrays(result.model), self.names)) or {}
        if of_target:
            self.of_target[number] = MetricRecord(of_target)

    def add_to(self, result: Result) -> None:
        """Fills in the metrics of the clients and of the unseen domain."""
        result.train_metrics_clientapp.update(self.of_training)
        result.evaluate_metrics_clientapp = {number: record for number, record in self.of_validation.items() if record}
        for number, record in self.of_target.items():
            result.evaluate_metrics_serverapp.setdefault(number, MetricRecord()).update(record)


def renamed(arrays: Arrays, names: Mapping[str, str]) -> ArrayRecord:
    """The tensors under the user's own names; what his module does not have is left out. Without names: as they are."""
    return state_to_record({names[name]: arrays[name] for name in names if name in arrays} if names else arrays)


class DatasetTarget:
    """Evaluates the unseen domain on the server, where it is a Dataset of (input, class)."""

    def __init__(self, net: nn.Module, data: Any, experiment: Experiment, device: torch.device) -> None:
        self.net, self.device = net.to(device), device
        self.loader = torch.utils.data.DataLoader(data, batch_size=experiment.run.evaluate_batch_size)
        self.rules = rules_of("classification", experiment.data, experiment.train)

    def messages(self, round: int, arrays: ArrayRecord, entries: Entries) -> list[Message]:
        """None: nobody else is asked."""
        return []

    def others(self, replies: Iterable[Message]) -> Iterator[Message]:
        """All replies."""
        yield from replies

    def take(self, used: bool = True) -> None:
        """Does nothing."""

    def score(self, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """The accuracy and the mean loss of a model on all examples."""
        state = {name: torch.from_numpy(array.copy()) for name, array in record_to_arrays(arrays).items()}
        self.net.load_state_dict(state)
        self.net.eval()
        value, loss, _ = self.rules.measure(self.net, self._batches())
        return TargetScore(value, loss)

    def ask(self, grid: Grid, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """The score of the initial model."""
        return self.score(arrays, entries)

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(inputs, classes) on the device; of rows that are tables, their two values in order."""
        for batch in self.loader:
            inputs, classes = batch.values() if isinstance(batch, Mapping) else batch
            yield inputs.to(self.device), classes.to(self.device)
