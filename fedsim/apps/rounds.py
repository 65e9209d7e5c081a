"""The rounds of an app whose clients know nothing of fedsim: they are those of `FedDG`, with and without records."""

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from safetensors.numpy import load_file
from torch import nn

from fedsim.common.lists import first_few
from fedsim.common.values import JsonTable, Row
from fedsim.data.fingerprint import Fingerprints
from fedsim.methods.recipe import Recipe
from fedsim.models.tasks import TaskRules, rules_of
from fedsim.runs import admission
from fedsim.runs.app_records import (
    KEY,
    log_best_round,
    recorded_numbers,
    refuse_other_clients,
    refuse_other_configs,
)
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
from strategies.wire.own_apps import EVALUATED, EXAMPLES, AppGrid, means_of, metric_record
from strategies.wire.target_site import TargetScore

logger = logging.getLogger("flwr.fedsim")  # by Flower's handler; a run of fedsim silences Flower's own lines
logger.setLevel(logging.INFO)
NOT_SHOWN = ("examples", "evaluation_seconds", "validation_examples", "images")  # columns of clients.csv


@dataclass
class AppSpace:
    """What records and server parts take from an app's run: its plan, and facts of the tensors that travel.

    net: the module of these tensors; None where only the tensors are known
    arrays: the initial model
    tested: the fingerprint of the unseen domain, where the server has it
    """

    plan: Plan
    net: nn.Module | None
    arrays: ArrayRecord
    tested: Fingerprints = field(default_factory=dict)

    def __post_init__(self) -> None:
        experiment = self.plan.experiment
        self.experiment = experiment
        self.recipe = self.plan.recipe
        self.task: TaskRules = rules_of(self.plan.data.task, experiment.data, experiment.train)
        self.device: torch.device = pick_device(experiment.run.device)
        self.places: dict[str, Place] = dict.fromkeys(self.arrays, "shared")

    def initial_arrays(self) -> ArrayRecord:
        """Returns the initial model."""
        return self.arrays

    def data_of(self, experiment: Experiment, recipe: Recipe) -> tuple[Fingerprints, Fingerprints]:
        """Returns the fingerprints (of the data that this process can read, of no images that parts use)."""
        return self.tested, {}

    def frozen_record(self) -> dict[str, str]:
        """Returns nothing: everything travels."""
        return {}

    def server_model(self) -> ServerModel:
        """Returns what the server's parts may know of the tensors.

        Without their module every float tensor is a parameter.
        """
        if self.net is None:
            kinds: dict[str, Kind] = {}
            for name, array in self.arrays.items():
                is_float = array.dtype.startswith("float")
                kinds[name] = Kind.WEIGHT if is_float else Kind.COUNTER
            floats = frozenset(name for name, kind in kinds.items() if kind is Kind.WEIGHT)
            return ServerModel(kinds, floats, device=self.device)
        named = self.net.named_parameters(remove_duplicate=False)
        parameters = frozenset(name for name, _ in named if name in self.places)
        return ServerModel(tensor_kinds(self.net), parameters, nonnegative_names(self.net), device=self.device)


class Rounds:
    """The rounds of an app's run. They are those of `FedDG`, with the clients of a roster."""

    def __init__(self, space: AppSpace, nodes: AppGrid, roster: OpenRoster, validates: bool) -> None:
        self.space = space
        self.nodes = nodes
        experiment = space.experiment
        recipe: ServerRecipe = space.recipe
        self.strategy = FedDG(recipe, experiment, space.places, roster.run_config, space.task.metric)
        server = self.strategy.server
        server.parts.model = space.server_model()
        server.exchange.join(roster)
        server.exchange.measured = ()
        server.exchange.validates = validates
        nodes.state = server.state
        self.metrics = Metrics(experiment.train.rounds, evaluated=nodes.evaluated)
        self.strategy.sinks.append(self.metrics)

    def play(self, arrays: ArrayRecord, rounds: int, evaluate_fn: Evaluate | None) -> Result:
        """Plays so many rounds; returns the last model and the metrics."""
        run = self.space.experiment.run
        server = self.strategy.server
        grid = PatientGrid(self.nodes, server.exchange, run.patience)
        with closing(server.storage):
            result = self.strategy.start(grid, arrays, rounds, run.timeout, evaluate_fn=evaluate_fn)
        self.metrics.add_to(result)
        return result

    def play_recorded(self, evaluate_fn: Evaluate | None, asked: JsonTable) -> Result:
        """Plays the rounds that are left, with records and checkpoints; returns the last model and the metrics.

        asked: the arguments of `fedsim.strategy` that say how clients are evaluated
        Raises UserError when the folder holds a run of other clients, configs, arguments or data.
        """
        plan = self.space.plan
        rounds = plan.experiment.train.rounds
        configs = {
            "train_config": plain(self.nodes.train_config),
            "evaluate_config": plain(self.nodes.evaluate_config),
            "strategy": asked,
        }
        refuse_other_clients(plan)
        refuse_other_configs(plan.folder, configs)
        if admission.is_already_finished(plan, self.space.data_of):
            logger.info("fedsim: already finished: %s", plan.folder)
            log_best_round(plan.folder)
            arrays = load_file(plan.folder / "last.safetensors")
            result = Result(arrays=state_to_record(arrays))
            add_recorded(result, plan.folder)
            return result
        with recorded(plan, ()) as (callbacks, check):
            session = Session(self.space, callbacks, check)
            session.note("app", configs)
            session.note(KEY, list(plan.clients))
            session.attach(self.strategy)
            for facts in self.space.tested.values():
                session.target_images = int(facts["images"])
            left = rounds - max(self.strategy.finished_rounds, 0)
            result = self.play(session.initial_arrays(), left, evaluate_fn)
            session.finish()
        log_best_round(plan.folder)
        add_recorded(result, plan.folder)
        return result


def plain(config: ConfigRecord) -> JsonTable:
    """Returns the values of a config as they are recorded, by name; bytes are written in hexadecimal digits."""
    values = {name: value.hex() if isinstance(value, bytes) else value for name, value in config.items()}
    return dict(values)


def add_recorded(result: Result, folder: Path) -> None:
    """Adds the metrics of the rounds that an earlier start has recorded, and this one did not play."""
    clients, scores = recorded_numbers(folder)
    for number, rows in clients.items():
        if number and number not in result.train_metrics_clientapp:
            of_training, of_validation = client_means(rows)
            result.train_metrics_clientapp[number] = of_training
            if of_validation:
                result.evaluate_metrics_clientapp[number] = of_validation
    for number, score in scores.items():
        result.evaluate_metrics_serverapp.setdefault(number, metric_record(score))
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        in_order = sorted(getattr(result, name).items())
        setattr(result, name, dict(in_order))


def client_means(rows: Mapping[str, Mapping[str, Any]]) -> tuple[MetricRecord, MetricRecord]:
    """Returns the means over the clients of a round (of what they say of training, of validation)."""
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    shown = [name for name in columns if name not in NOT_SHOWN and not name.startswith(("bytes_", EVALUATED))]
    of_training = [name for name in shown if not name.startswith("validation_")]
    of_validation = [name for name in shown if name.startswith("validation_")]
    validation = means_of(rows, of_validation)
    for name in columns:
        if name.startswith(EVALUATED):
            own_name = name.removeprefix(EVALUATED)
            validation[own_name] = weighted_mean(rows, name)
    return means_of(rows, of_training), validation


def weighted_mean(rows: Mapping[str, Mapping[str, Any]], column: str) -> float:
    """Returns the mean of a column over the clients that have it, weighted as by FedAvg: by validation examples."""
    amount, examples = 0.0, 0.0
    for row in rows.values():
        if column in row:
            amount += row[column] * row["validation_examples"]
            examples += row["validation_examples"]
    return amount / examples


class Metrics(Sink):
    """Logs each round as Flower's own strategies do, and keeps what Flower's Result says of it.

    names: the user's own names of tensors, by ours, for evaluate_fn; where he has none, tensors have his names already
    evaluated: by client, the metrics of its reply to evaluate in the round, which become columns of its row
    """

    def __init__(
        self,
        rounds: int,
        names: Mapping[str, str] | None = None,
        evaluate_fn: Evaluate | None = None,
        evaluated: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self.rounds = rounds
        self.names = names or {}
        self.evaluate = evaluate_fn
        self.evaluated = {} if evaluated is None else evaluated
        self.of_training: dict[int, MetricRecord] = {}
        self.of_validation: dict[int, MetricRecord] = {}
        self.of_target: dict[int, MetricRecord] = {}

    def begin_round(self, number: int) -> None:
        """Logs the number of the round."""
        if number:
            logger.info("[ROUND %d/%d]", number, self.rounds)

    def end_round(self, result: RoundResult) -> None:
        """Logs and keeps the means over the clients, and the score on the unseen domain."""
        number, target = result.number, result.target
        if number:
            for client, row in result.notes.clients.items():
                if "validation_examples" in row:
                    row.update(own_columns(self.evaluated.get(client, {})))
            self._add_clients(number, result.notes.clients)
        metrics: dict[str, Any] = {}
        if target.value is not None:
            metrics = {"accuracy": target.value, "loss": float(target.loss or 0.0)}
            logger.info("\t unseen domain: %s", with_digits(metrics))
        if self.evaluate:
            model = renamed(record_to_arrays(result.model), self.names)
            metrics |= self.evaluate(number, model) or {}
        if metrics:
            self.of_target[number] = MetricRecord(metrics)

    def _add_clients(self, number: int, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Logs and keeps the means over the clients of a round, whose rows are given by the name of the client."""
        self.of_training[number], self.of_validation[number] = client_means(rows)
        means = {**self.of_validation[number], **self.of_training[number]}
        columns = {name for row in rows.values() for name in row} - {"weight", "gap_valid"}
        shown = {name: mean for name, mean in means.items() if name in columns}
        logger.info("\t means over the clients: %s", with_digits(shown))
        weights = {client: row["weight"] for client, row in rows.items() if "weight" in row}
        logger.info("\t weights: %s", with_digits(weights))

    def add_to(self, result: Result, folder: Path | None = None) -> None:
        """Fills in the metrics of the clients and of the unseen domain; folder: of records that have further rounds."""
        result.train_metrics_clientapp.update(self.of_training)
        result.evaluate_metrics_clientapp = {number: record for number, record in self.of_validation.items() if record}
        for number, record in self.of_target.items():
            metrics = result.evaluate_metrics_serverapp.setdefault(number, MetricRecord())
            metrics.update(record)
        if folder:
            add_recorded(result, folder)


def with_digits(numbers: Mapping[str, Any]) -> str:
    """Returns names with their numbers in four digits that count, of at most ten of them.

    >>> with_digits({"gap": 0.0321017, "steps": 12.0})
    'gap 0.0321, steps 12'
    """
    return first_few(f"{name} {value:.4g}" for name, value in numbers.items())


def own_columns(metrics: Mapping[str, float]) -> Row:
    """Returns a client's metrics of an evaluation as columns of clients.csv, except the number of examples."""
    columns = {}
    for name, value in metrics.items():
        if name != EXAMPLES and name.isprintable():
            columns[f"{EVALUATED}{name}"] = float(value)
    return columns


def renamed(arrays: Arrays, names: Mapping[str, str]) -> ArrayRecord:
    """Returns the tensors under the user's own names; without names they stay as they are.

    What his module does not have is left out.
    """
    if not names:
        return state_to_record(arrays)
    of_user = {names[name]: arrays[name] for name in names if name in arrays}
    return state_to_record(of_user)


class DatasetTarget:
    """Evaluates the unseen domain on the server, where it is a Dataset of (input, class)."""

    def __init__(self, net: nn.Module, data: Any, experiment: Experiment, device: torch.device) -> None:
        self.net, self.device = net.to(device), device
        self.examples = len(data)
        self.loader = torch.utils.data.DataLoader(data, batch_size=experiment.run.evaluate_batch_size)
        self.rules = rules_of("classification", experiment.data, experiment.train)

    def messages(self, round: int, arrays: ArrayRecord, entries: Entries) -> list[Message]:
        """Returns no message: nobody else is asked."""
        return []

    def others(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yields all replies."""
        yield from replies

    def take(self, used: bool = True) -> None:
        """Does nothing."""

    def score(self, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """Returns the accuracy and the mean loss of a model on all examples."""
        started = time.perf_counter()
        tensors = record_to_arrays(arrays)
        state = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
        self.net.load_state_dict(state)
        self.net.eval()
        value, loss, _ = self.rules.measure(self.net, self._batches())
        return TargetScore(value, loss, time.perf_counter() - started)

    def ask(self, grid: Grid, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """Returns the score of the initial model."""
        return self.score(arrays, entries)

    def fingerprint(self) -> dict[str, int | str]:
        """Returns the number of examples and a hash of them, which a run records of the data on which it rests."""
        of_inputs, of_classes = hashlib.blake2b(digest_size=10), hashlib.blake2b(digest_size=10)
        for inputs, classes in self._batches():
            of_inputs.update(inputs.cpu().numpy().tobytes())
            of_classes.update(classes.cpu().numpy().tobytes())
        return {"images": self.examples, "content": of_inputs.hexdigest() + of_classes.hexdigest()}

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (inputs, classes) on the device; of rows that are tables, their two values in order."""
        for batch in self.loader:
            inputs, classes = batch.values() if isinstance(batch, Mapping) else batch
            yield inputs.to(self.device), classes.to(self.device)
