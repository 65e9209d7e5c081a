"""`fedsim.strategy`: the server's side of a method as a strategy of any Flower app.

strategy = fedsim.strategy("feddg-ga")
result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=10)
"""

from fedsim.common.edge import refuse_hidden_packages

refuse_hidden_packages()  # before the first import of `clients` or `strategies`

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from safetensors.numpy import load_file
from torch import nn

from fedsim.apps.given import made, named_recipe
from fedsim.common.errors import UserError
from fedsim.common.values import Json
from fedsim.data.of_apps import DATASET
from fedsim.methods.any_client import banks_of, needs_of, of_our_client
from fedsim.methods.assembly import assemble, build_recipe
from fedsim.methods.recipe import SLOTS, Recipe
from fedsim.models.tasks import TaskRules, rules_of
from fedsim.runs import admission
from fedsim.runs.plan import Plan, resolve
from fedsim.runs.serve import recorded
from fedsim.runs.session import Session
from fedsim.runs.workspace import pick_device
from fedsim.settings.experiment import SECTIONS, Experiment
from fedsim.settings.keywords import experiment_of
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.kinds import Kind, nonnegative_names, tensor_kinds
from fedsim.tensors.records import Config
from strategies.base import DEFAULT_TIMEOUT, Evaluate, FedDG, Sink, WholeRounds
from strategies.model import ServerModel
from strategies.parts import Entries, Place
from strategies.recipe import ServerRecipe
from strategies.round import RoundResult
from strategies.state import ServerState
from strategies.wire.grids import PatientGrid, QuickGrid
from strategies.wire.handshake import OpenRoster
from strategies.wire.own_apps import AppGrid, means_of
from strategies.wire.target_site import TargetScore, TargetSite

NOBODY = "no-target"  # the unseen domain's name where there is none
UNSEEN = "unseen"  # its name where only its data are given
OF_ROUNDS = ("clients_per_round", "evaluate_clients", "evaluate_every")  # settings of [train] that are the server's
RESERVED = {"target": "give the unseen domain to strategy.start(..., target=...)",
            "rounds": "give their number to strategy.start(..., num_rounds=...)",
            "timeout": "give it to strategy.start(..., timeout=...)",
            "runtime": "the app's own command says where it runs"}  # fmt: skip

logger = logging.getLogger("flwr")
Target = Any  # a Dataset, (name, Dataset), the name of a client, or None


def strategy(
    method: str | Recipe,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    output: str = "",
    min_available_nodes: int = 2,
    score: str = "",
    evaluates: bool = True,
    **settings: Json,
) -> "AppStrategy":
    """A Flower strategy by the server's parts of a method, for an app with a ClientApp of its own.

    method: a row of `fedsim methods`, a combination `a+b`, a `Recipe`, or `module:name`
    model: the module that the clients train, or a function that makes it; it may be left out where `start` gets
    `initial_arrays`
    output: the folder for records and checkpoints, from which `start` resumes; empty: nothing is written
    min_available_nodes: how many clients are awaited before the first round; those that are online then take part
    score: the metric of the clients' replies to evaluate that is their accuracy; empty: eval_acc or a usual name
    evaluates: False when clients are not to be asked for an evaluation
    settings: of the experiment file, under their names, such as `seed=1` or `krum={"select": 3}`

    Raises UserError for an unknown method or setting, and for a method whose client trains in another way than
    FedAvg's.
    """
    name, net = named_recipe(method), made(model)
    experiment = app_experiment(name, settings, output, net)
    recipe = build_recipe(experiment)
    if reason := of_our_client(recipe):
        raise UserError(f"{name}: {reason}, and a ClientApp of your own trains as FedAvg's does; use fedsim.client_app")
    return AppStrategy(experiment, recipe, net, bool(output), min_available_nodes, score, evaluates)


def app_experiment(method: str, settings: Mapping[str, Json], output: str, net: nn.Module | None) -> Experiment:
    """The experiment of an app's run, before its clients are known; UserError for settings that do not fit."""
    parts = [*assemble({"name": method}, {}).named, *SLOTS, "add"]
    experiment = experiment_of(method, {"name": "app", **settings}, parts)
    refuse_client_settings(experiment)
    run = {"runtime": "deployment", "keep_predictions": False} | ({"output": output} if output else {})
    kind = type(net)
    model = {} if net is None else {"backbone": f"{kind.__module__}:{kind.__name__}"}
    return experiment.replace(data={"dataset": DATASET}, model=model, run=run)


def refuse_client_settings(experiment: Experiment) -> None:
    """Raises UserError for a setting that acts on the client, whose own code says what it does, or that `start` has."""
    usual = Experiment()
    for section, kind in SECTIONS.items():
        for name in kind.model_fields:
            if getattr(getattr(experiment, section), name) == getattr(getattr(usual, section), name):
                continue
            if name in RESERVED:
                raise UserError(f"fedsim.strategy takes no {name}: {RESERVED[name]}")
            if section != "run" and name not in OF_ROUNDS:
                raise UserError(f"{name} acts on the client, and a ClientApp of your own has its own {name}; leave it "
                                "out, or send it to your clients by start(..., train_config=...)")  # fmt: skip


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
        self.task: TaskRules = rules_of(self.plan.data.task, self.experiment.data)
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


class AppStrategy(WholeRounds):
    """A strategy for the nodes of any Flower app; `fedsim.strategy` makes it."""

    def __init__(
        self,
        experiment: Experiment,
        recipe: Recipe,
        net: nn.Module | None,
        records: bool,
        least: int,
        score: str,
        evaluates: bool,
    ) -> None:
        self.experiment, self.recipe, self.net, self.records = experiment, recipe, net, records
        self.least, self.score, self.evaluates = least, score, evaluates

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = DEFAULT_TIMEOUT,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
        target: Target = None,
    ) -> Result:
        """Meets the clients, plays the rounds, and returns the last model and the metrics of each round.

        initial_arrays: the model from which the first round starts; left out: that of `fedsim.strategy`
        train_config, evaluate_config: what the messages' config contains beside `server-round`
        evaluate_fn: called with the number of a round and its model, before the first round (0) and after each
        target: the unseen domain, which decides nothing: a Dataset of (input, class), (its name, such a Dataset), or
        the name of a client that holds it and does not train; None: there is none

        Raises UserError for a target that trains and for a model that does not fit, ClientFailedError for a client that
        fails.
        """
        arrays = self._initial(initial_arrays)
        name, data = unseen(target)
        at_client = data is None and name != NOBODY
        nodes = AppGrid(
            QuickGrid(grid, packs=False),
            arrays,
            needs_of(self.recipe),
            banks_of(self.recipe),
            ServerState(),
            target=name if at_client else "",
            score=self.score,
        )
        nodes.train_config, nodes.evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        roster = self._meet(nodes, name if at_client else "", timeout)
        plan = self._plan(list(roster.sites), name, num_rounds, timeout)
        rounds = Rounds(AppSpace(plan, self.net, arrays), nodes, roster, self.evaluates and not nodes.silent)
        if at_client:
            rounds.strategy.server.target = TargetSite(rounds.strategy.server.exchange, roster)
        elif data is not None:
            rounds.strategy.server.target = DatasetTarget(self._network(), data, plan.experiment, rounds.space.device)
        if not self.records:
            return rounds.play(arrays, num_rounds, evaluate_fn)
        return rounds.play_recorded(evaluate_fn, len(data) if data is not None else None)

    def _initial(self, arrays: ArrayRecord | None) -> ArrayRecord:
        """The initial model; UserError without one, and for tensors that are not those of the given module."""
        if self.net is None and arrays is None:
            raise UserError("there is no initial model: give model=... to fedsim.strategy, or initial_arrays to start")
        if self.net is None or arrays is None:
            return arrays if arrays is not None else state_to_record(self.net.state_dict())  # type: ignore[union-attr]
        if arrays.keys() != self.net.state_dict().keys():
            odd = sorted(arrays.keys() ^ self.net.state_dict().keys())
            raise UserError(f"initial_arrays are not the tensors of the model: {', '.join(odd[:4])}")
        return arrays

    def _network(self) -> nn.Module:
        """The module that is evaluated; UserError without one."""
        if self.net is None:
            raise UserError("target is a Dataset, and there is no model to evaluate: give model=... to fedsim.strategy")
        return self.net

    def _meet(self, nodes: AppGrid, target: str, timeout: float) -> OpenRoster:
        """The clients that are online, by name."""
        run = self.experiment.replace(run={"timeout": timeout}).run
        config: Config = {"experiment": "", "state-dir": "", "token": secrets.token_hex(8), "timeout": timeout}
        roster = OpenRoster(nodes, self.least, config, target=target)
        roster.gather(run)
        return roster

    def _plan(self, clients: Sequence[str], target: str, rounds: int, timeout: float) -> Plan:
        """The plan of a run of these clients; UserError when one of them holds the unseen domain."""
        domains = sorted({client.partition("/")[0] for client in clients})
        if target in domains:
            raise UserError(f"target {target!r} is among the sources ({', '.join(domains)}), which train on it; the "
                            "unseen domain needs another name")  # fmt: skip
        experiment = self.experiment.replace(
            data={"domains": [*domains, target]},
            train={"rounds": rounds},
            run={"target": target, "timeout": timeout, "evaluate_target": "server"},
        )
        return replace(resolve(experiment), clients=tuple(clients))


def unseen(target: Target) -> tuple[str, Any]:
    """(name of the unseen domain, its Dataset); no Dataset where a client holds it, and where there is none."""
    if target is None:
        return NOBODY, None
    if isinstance(target, str):
        return target, None
    name, data = target if isinstance(target, tuple) and len(target) == 2 else (UNSEEN, target)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise UserError(f"target is {type(data).__name__}; give a Dataset of (input, class), (name, Dataset), or the "
                        "name of a client")  # fmt: skip
    return str(name), data


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


NOT_SHOWN = ("bytes_", "examples", "evaluation_seconds", "validation_examples")  # beginnings of columns


class Metrics(Sink):
    """Logs each round as Flower's own strategies do, and keeps what Flower's Result says of it."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.of_clients: dict[int, MetricRecord] = {}
        self.of_target: dict[int, MetricRecord] = {}

    def begin_round(self, number: int) -> None:
        """Logs the number of the round."""
        if number:
            logger.info("[ROUND %d/%d]", number, self.rounds)

    def end_round(self, result: RoundResult) -> None:
        """Logs and keeps the means over the clients, and the score on the unseen domain."""
        rows, number, target = result.notes.clients, result.number, result.target
        columns = dict.fromkeys(name for row in rows.values() for name in row)
        if number:
            self.of_clients[number] = means_of(rows, [name for name in columns if not name.startswith(NOT_SHOWN)])
            shown = {name: value for name, value in self.of_clients[number].items() if name != "weight"}
            logger.info("\t clients: %s", shown)
        if target.value is not None:
            self.of_target[number] = MetricRecord({"accuracy": target.value, "loss": float(target.loss or 0.0)})
            logger.info("\t unseen domain: %s", dict(self.of_target[number]))

    def add_to(self, result: Result) -> None:
        """Fills in the metrics of the clients' training and of the unseen domain."""
        result.train_metrics_clientapp.update(self.of_clients)
        for number, record in self.of_target.items():
            result.evaluate_metrics_serverapp.setdefault(number, MetricRecord()).update(record)


class DatasetTarget:
    """Evaluates the unseen domain on the server, where it is a Dataset of (input, class)."""

    def __init__(self, net: nn.Module, data: Any, experiment: Experiment, device: torch.device) -> None:
        self.net, self.device = net.to(device), device
        self.loader = torch.utils.data.DataLoader(data, batch_size=experiment.run.evaluate_batch_size)
        self.rules = rules_of("classification", experiment.data)

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
