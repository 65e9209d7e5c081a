"""`fedsim.strategy`: the server's side of a method as a strategy of any Flower app.

strategy = fedsim.strategy("feddg-ga")
result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=10)
"""

from fedsim.common.exit_codes import refuse_hidden_packages

refuse_hidden_packages()  # before the first import of `clients` or `strategies`

import copy
import json
import secrets
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from safetensors.numpy import load_file
from torch import nn

from fedsim.apps.given import Model, made, named_model, named_recipe
from fedsim.apps.rounds import AppSpace, DatasetTarget, Metrics, Rounds, renamed
from fedsim.common.errors import UserError
from fedsim.common.tasks import CLASSIFICATION, OF_CLASSES
from fedsim.common.values import Json, JsonTable
from fedsim.data.of_apps import DATASET, HERE, hold, settings_for
from fedsim.methods.any_client import banks_of, needs_of, of_no_app, of_our_client
from fedsim.methods.assembly import assemble, build_recipe
from fedsim.methods.recipe import SLOTS, Recipe
from fedsim.models.own_module import outputs_of, own_names
from fedsim.runs.plan import resolve
from fedsim.runs.serve import serve
from fedsim.settings.experiment import OF_ROUNDS, SECTIONS, Experiment
from fedsim.settings.keywords import experiment_of
from fedsim.settings.run import NO_TARGET
from fedsim.tensors.arrays import state_to_record
from fedsim.tensors.records import Config
from strategies.base import DEFAULT_TIMEOUT, Evaluate
from strategies.state import ServerState
from strategies.whole_rounds import WholeRounds
from strategies.wire.grids import QuickGrid
from strategies.wire.handshake import OpenRoster
from strategies.wire.own_apps import AppGrid
from strategies.wire.target_site import TargetSite

UNSEEN = "unseen"  # its name where only its data are given
OF_PLACES = ("runtime", "federation", "processes", "workers", "ray_address", "cpus_per_worker", "gpus_per_worker")
RESERVED = {
    "target": "give the unseen domain to strategy.start(..., target=...)",
    "rounds": "give their number to strategy.start(..., num_rounds=...)",
    "timeout": "give it to strategy.start(..., timeout=...)",
    **dict.fromkeys(OF_PLACES, "the app's own command says where it runs"),
    "evaluate_target": "strategy.start(..., target=...) says who holds the unseen domain",
    "attackers": "they belong to simulations",
    "doubt": "it is fitted by fedsim.run, and by runs of a deployment",
    "output": "give it to fedsim.strategy(..., output=...)",
}

# What [run] says to the clients as well, or of the app's run as a whole; all else is the server's alone.
OF_CLIENTS = ("seed", "device", "threads", "runtime")

# Of [run], what only fedsim's own clients do.
OF_OUR_CLIENT = ("select_on", "personalised", "record", "keep_personal", "validation_domain")
# What acts on the records of a run.
OF_RECORDS = ("stop_after", "dp_max_epsilon", "callbacks", "tensorboard", "keep_state")

# Arguments of Flower's FedAvg that have other names here.
OF_FLOWER = {
    "fraction_train": "clients_per_round=N trains N clients in each round",
    "fraction_evaluate": "evaluate_clients says which clients validate",
    "min_train_nodes": "min_available_nodes=N awaits N clients before the first round",
    "min_evaluate_nodes": "min_available_nodes=N awaits N clients before the first round",
    "weighted_by_key": "the examples of a client are the metric num-examples of its replies",
}
# Words of messages, and the arguments of fedsim.strategy that take their place in an app.
ARGUMENTS = {
    "another --output or name": "another output=...",
    "set run.keep_state = true": "give fedsim.strategy(..., keep_state=True)",
    "(train.rounds)": "(num_rounds)",
}

Target = Any  # a Dataset, (name, Dataset), the name of a client, or None


def strategy(
    method: str | Recipe,
    model: Model | None = None,
    *,
    client: str = "any",
    output: str = "",
    min_available_nodes: int = 2,
    score: str = "",
    evaluates: bool = True,
    **settings: Json,
) -> "AppStrategy":
    """A Flower strategy by the server's parts of a method, for the ClientApp of any app.

    method: a row of `fedsim methods`, a combination `a+b`, a `Recipe`, or `module:name`
    model: the module that the clients train, or a function that makes it; it may be left out where `start` gets
    `initial_arrays` and the ClientApp is one's own
    client: "fedsim" where the ClientApp is `fedsim.client_app`, with which every method runs; "any" for every ClientApp
    output: the folder for records and checkpoints, from which `start` resumes; empty: nothing is written
    min_available_nodes: how many clients are awaited before the first round; those that are online then take part
    score: the metric of the clients' replies to evaluate that is their accuracy; empty: eval_acc or a usual name
    evaluates: False when clients are not to be asked for an evaluation
    settings: of the experiment file, under their names, such as `seed=1` or `krum={"select": 3}`

    Raises UserError for an unknown method or setting, and for a method whose client trains in another way than
    FedAvg's, without `client="fedsim"`.
    """
    if client not in ("any", "fedsim"):
        raise UserError(f"client is {client!r}; write 'any', or 'fedsim' where the ClientApp is fedsim.client_app")
    for argument, instead in OF_FLOWER.items():
        if argument in settings:
            raise UserError(f"fedsim.strategy takes no {argument}, which is FedAvg's: {instead}")
    name = named_recipe(method)
    experiment = app_experiment(name, settings)
    recipe = build_recipe(experiment)
    no_app = of_no_app(recipe)
    if no_app:
        raise UserError(f"{name}: {no_app}, and an app has its own data and network; use fedsim.run")
    if client == "any":
        refuse_client_settings(settings)
        if not output:
            refuse_without_records(settings)
        reason = of_our_client(recipe)
        if reason:
            raise UserError(f"{name}: {reason}, and a ClientApp of your own trains as FedAvg's does; use "
                            "fedsim.client_app there, and client='fedsim' here")  # fmt: skip
    elif model is None:
        raise UserError("client='fedsim' needs the network: give model=... to fedsim.strategy")
    asked = Asked(name, settings, output, client == "fedsim", min_available_nodes, score, evaluates)
    net = made(model, experiment.run.seed)
    return AppStrategy(asked, experiment, recipe, net)


def app_experiment(method: str, settings: Mapping[str, Json]) -> Experiment:
    """Returns the experiment of an app's run, before its clients are known.

    Raises UserError for settings that do not fit.
    """
    parts = [*assemble({"name": method}, {}).named, *SLOTS, "add"]
    experiment = experiment_of(method, {"name": "app", **settings}, parts)
    for name, reason in RESERVED.items():
        section = "train" if name == "rounds" else "run"
        if is_given(settings, section, name):
            raise UserError(f"fedsim.strategy and fedsim.client_app take no {name}: {reason}")
    task = experiment.data.task
    if task not in ("", CLASSIFICATION.name):
        raise UserError(f"data.task = {task!r}: fedsim.strategy and fedsim.client_app take examples of "
                        "classes, measured by accuracy; use fedsim.run, or a deployment")  # fmt: skip
    return experiment.replace(data={"dataset": DATASET}, run={"runtime": "deployment"})


def is_given(settings: Mapping[str, Json], section: str, name: str) -> bool:
    """Whether keywords give a setting, by its name or in its section, were it with the value that it has without them.

    >>> is_given({"lr": 0.01}, "train", "lr"), is_given({"train": {"lr": 0.01}}, "train", "momentum")
    (True, False)
    """
    of_section = settings.get(section)
    by_name = name in settings and name not in SECTIONS  # `train` is a section, and a setting of the model
    return by_name or (isinstance(of_section, Mapping) and name in of_section)


def refuse_client_settings(settings: Mapping[str, Json]) -> None:
    """Raises UserError for a setting that acts on the client, whose own code says what it does."""
    for section, kind in SECTIONS.items():
        for name in kind.model_fields:
            if section == "run" or name in OF_ROUNDS:
                continue  # it is the server's
            if is_given(settings, section, name):
                raise UserError(f"{name} acts on the client, and a ClientApp of your own has its own {name}; leave it "
                                "out, or send it to your clients by start(..., train_config=...)")  # fmt: skip
    for name in OF_OUR_CLIENT:
        if is_given(settings, "run", name):
            raise UserError(f"{name} needs fedsim's own clients (fedsim.client_app), and a ClientApp of your own does "
                            "not know it; leave it out")  # fmt: skip


def refuse_without_records(settings: Mapping[str, Json]) -> None:
    """Raises UserError for a setting that acts on the records of a run, of which there are none."""
    for name in OF_RECORDS:
        section = "run" if name in SECTIONS["run"].model_fields else "train"
        if is_given(settings, section, name):
            raise UserError(f"{name} looks at the records of a run: give fedsim.strategy(..., output=...) a folder")


def refuse_server_settings(settings: Mapping[str, Json]) -> None:
    """Raises UserError where the settings of `fedsim.client_app` have one that the server alone decides."""
    for name in SECTIONS["run"].model_fields:
        if name not in OF_CLIENTS and is_given(settings, "run", name):
            raise UserError(f"fedsim.client_app takes no {name}, which is the server's: give {name} to fedsim.strategy")


@dataclass(frozen=True)
class Asked:
    """The arguments of a call of `fedsim.strategy`, without the network."""

    method: str
    settings: Mapping[str, Json]
    output: str
    of_fedsim: bool
    least: int
    score: str
    evaluates: bool


class AppStrategy(WholeRounds):
    """A strategy for the nodes of any Flower app; `fedsim.strategy` makes it."""

    def __init__(self, asked: Asked, experiment: Experiment, recipe: Recipe, net: nn.Module | None) -> None:
        self.asked = asked
        self.experiment = experiment
        self.recipe = recipe
        self.net = net

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
        train_config, evaluate_config: what the messages' config contains besides `server-round`
        evaluate_fn: called with the number of a round and its model, before the first round (0) and after each
        target: the unseen domain, which decides nothing: a Dataset of (input, class), (its name, such a Dataset), or
        the name of a client that holds it and does not train; None: there is none

        Raises UserError for a target that trains and for a model that does not fit, ClientFailedError for a client that
        fails.
        """
        name, data = unseen(target)
        if data is not None and self.net is None:
            raise UserError("target is a Dataset, and there is no model to evaluate: give model=... to fedsim.strategy")
        call = Call(self._initial(initial_arrays), num_rounds, timeout, evaluate_fn, name, data)
        try:
            return self._play(grid, call, train_config, evaluate_config)
        except UserError as error:
            raise UserError(in_words_of_apps(str(error))) from None

    def _play(
        self,
        grid: Grid,
        call: "Call",
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
    ) -> Result:
        """Meets the clients and plays the rounds; raises as `start` does."""
        nodes = AppGrid(
            QuickGrid(grid, packs=False),
            call.arrays,
            needs_of(self.recipe),
            banks_of(self.recipe),
            ServerState(),
            call.site,
            self.asked.score,
        )
        nodes.train_config = train_config or ConfigRecord()
        nodes.evaluate_config = evaluate_config or ConfigRecord()
        roster = self._meet(nodes, call)
        clients = list(roster.sites)
        if call.site:
            clients.append(call.site)
        introductions = self._introductions(nodes, clients)
        if not introductions:
            return self._with_any_clients(nodes, roster, call)
        if train_config or evaluate_config:
            raise UserError("remove train_config and evaluate_config from strategy.start: lr and other settings "
                            "of the training go into fedsim.client_app(...)")  # fmt: skip
        if self.asked.score or not self.asked.evaluates:
            raise UserError("remove score and evaluates from fedsim.strategy: they are for ClientApps of your own, and "
                            "fedsim.client_app validates by its accuracy (evaluate_every says when)")  # fmt: skip
        return self._with_our_clients(grid, call, roster, introductions)

    def _initial(self, arrays: ArrayRecord | None) -> ArrayRecord:
        """Returns the initial model.

        Raises UserError without one, and for tensors that are not those of the given module.
        """
        if self.net is None:
            if arrays is None:
                raise UserError(
                    "there is no initial model: give model=... to fedsim.strategy, or initial_arrays to start"
                )
            return arrays
        state = self.net.state_dict()
        if arrays is None:
            return state_to_record(state)
        odd = sorted(arrays.keys() ^ state.keys())
        if odd:
            raise UserError(f"initial_arrays are not the tensors of the model: {', '.join(odd[:4])}")
        return arrays

    def _meet(self, nodes: AppGrid, call: "Call") -> OpenRoster:
        """Returns the clients that are online, by name; raises UserError when one trains on the unseen domain."""
        run = self.experiment.replace(run={"timeout": call.timeout}).run
        config: Config = {
            "experiment": "",
            "state-dir": "",
            "token": secrets.token_hex(8),
            "timeout": call.timeout,
        }
        roster = OpenRoster(nodes, self.asked.least, config, target=call.site)
        roster.gather(run)
        domains = domains_of(roster)
        if call.target in domains:
            sources = ", ".join(domains)
            raise UserError(f"target {call.target!r} is among the sources ({sources}), which train on it; "
                            "the unseen domain needs another name")  # fmt: skip
        return roster

    def _introductions(self, nodes: AppGrid, clients: Sequence[str]) -> dict[str, JsonTable]:
        """Returns what clients of `fedsim.client_app` said of themselves, by name; empty where none is such a client.

        Raises UserError when some are and others are not, and when the method needs them and none is.
        """
        introductions: dict[str, JsonTable] = {}
        others: list[str] = []
        for client in clients:
            if client in nodes.introduced:
                introductions[client] = json.loads(nodes.introduced[client])
            else:
                others.append(client)
        if others and (introductions or self.asked.of_fedsim):
            raise UserError(f"client {others[0]!r} is not fedsim.client_app, and {self.asked.method} with "
                            "client='fedsim' needs it on every client")  # fmt: skip
        return introductions

    def _with_any_clients(self, nodes: AppGrid, roster: OpenRoster, call: "Call") -> Result:
        """Plays the run with ClientApps that know nothing of fedsim."""
        if self.experiment.run.select_by in OF_CLASSES:
            raise UserError("ClientApps of your own reply with an accuracy and a loss; select_by is primary or loss")
        run = {"keep_predictions": False, "evaluate_target": "server", **self._output()}
        model = {} if self.net is None else {"backbone": class_of(self.net)}
        experiment = call.planned(self.experiment, domains_of(roster))
        plan = resolve(experiment.replace(run=run, model=model))
        plan = replace(plan, clients=tuple(roster.sites))
        space = AppSpace(plan, self.net, call.arrays)
        validates = self.asked.evaluates and all_evaluate(roster, nodes.silent)
        rounds = Rounds(space, nodes, roster, validates)
        server = rounds.strategy.server
        if roster.target:
            server.target = TargetSite(server.exchange, roster)
        elif call.data is not None and self.net is not None:
            net = copy.deepcopy(self.net)
            server.target = target = DatasetTarget(net, call.data, plan.experiment, space.device)
            if self.asked.output:
                space.tested = {call.target: target.fingerprint()}
        if self.asked.output:
            asked = {"score": self.asked.score, "evaluates": self.asked.evaluates}
            return rounds.play_recorded(call.evaluate_fn, asked)
        return rounds.play(call.arrays, call.rounds, call.evaluate_fn)

    def _output(self) -> JsonTable:
        """Returns the setting of the folder for records; empty without such a folder."""
        return {"output": self.asked.output} if self.asked.output else {}

    def _with_our_clients(
        self,
        grid: Grid,
        call: "Call",
        roster: OpenRoster,
        introductions: Mapping[str, JsonTable],
    ) -> Result:
        """Plays the run with the clients of `fedsim.client_app`: that of a deployment, whose sites are the clients."""
        if self.recipe.visits and not call.site:
            raise UserError(f"{self.asked.method} visits the unseen domain: give start(..., target=...) the name of a "
                            "client that holds it")  # fmt: skip
        net = copy.deepcopy(self.net)
        assert net is not None
        net.load_state_dict(call.arrays.to_torch_state_dict())
        names = own_names(net)
        facts = agreed(introductions, self.asked)
        shape = tuple(facts["shape"])
        if call.data is not None:
            hold_target(call.target, call.data, shape, facts["images"])
        experiment = experiment_of_both(self.asked, facts["settings"])
        refuse_other_seed(experiment.run.seed, self.experiment.run.seed)
        experiment = call.planned(experiment, domains_of(roster))
        of_data = {**named_classes(net), "split": "lists", **settings_for(shape, facts["images"])}
        model = {"backbone": named_model(net)}
        metrics = Metrics(call.rounds, names, call.evaluate_fn)
        with tempfile.TemporaryDirectory(prefix="fedsim-app-") as folder:
            run = {"output": folder, **self._output()}
            plan = resolve(experiment.replace(data=of_data, model=model, run=run))
            serve(QuickGrid(grid), plan, sinks=[metrics])
            result = Result(arrays=renamed(load_file(plan.folder / "last.safetensors"), names))
            metrics.add_to(result, plan.folder)
        return result


def named_classes(net: Any) -> dict[str, list[str]]:
    """Returns the setting of the classes of a network, which have numbers alone."""
    return {"classes": [str(number) for number in range(outputs_of(net))]}


def experiment_of_both(asked: Asked, of_clients: JsonTable) -> Experiment:
    """Returns the experiment of the server's settings and the clients'; raises UserError as `app_experiment` does.

    A setting of the server's that clients give is refused, because a client could name code that the server loads.
    """
    refuse_server_settings(of_clients)
    return app_experiment(asked.method, {**asked.settings, **of_clients})


def refuse_other_seed(seed: int, of_server: int) -> None:
    """Raises UserError where the clients of an app have another seed than its server."""
    if seed != of_server:
        raise UserError(f"seed is {seed} in fedsim.client_app, and {of_server} in fedsim.strategy, which makes the "
                        "first weights with it; give both the same")  # fmt: skip


def in_words_of_apps(text: str) -> str:
    """Returns a message of a run, which names options of commands, with the arguments that an app has for them.

    >>> in_words_of_apps("choose another --output or name")
    'choose another output=...'
    """
    for words, argument in ARGUMENTS.items():
        text = text.replace(words, argument)
    return text


@dataclass(frozen=True)
class Call:
    """The arguments of a call of `start`.

    arrays: the initial model. target: the name of the unseen domain, and data its Dataset, where the server has it
    """

    arrays: ArrayRecord
    rounds: int
    timeout: float
    evaluate_fn: Evaluate | None
    target: str
    data: Any

    @property
    def site(self) -> str:
        """The client that holds the unseen domain; empty: none does."""
        if self.data is not None or self.target == NO_TARGET:
            return ""
        return self.target

    def planned(self, experiment: Experiment, domains: Sequence[str]) -> Experiment:
        """Returns the experiment with the domains of the clients, the unseen one, the rounds and the time limit."""
        place = "site" if self.site else "server"
        unseen = [] if self.target == NO_TARGET else [self.target]
        return experiment.replace(
            data={"domains": [*domains, *unseen]},
            train={"rounds": self.rounds},
            run={"target": self.target, "timeout": self.timeout, "evaluate_target": place},
        )


def all_evaluate(roster: OpenRoster, silent: Collection[int]) -> bool:
    """Whether the clients evaluate; silent: the nodes whose app cannot.

    Raises UserError where some do and others do not.
    """
    without = [client for client, site in roster.sites.items() if site.node_id in silent]
    if without and len(without) < len(roster.sites):
        raise UserError(f"client {without[0]!r} has no function that evaluates, and others have one; give it one, or "
                        "fedsim.strategy(..., evaluates=False), with which nobody validates")  # fmt: skip
    return not without


def domains_of(roster: OpenRoster) -> list[str]:
    """Returns the domains of the clients that train, sorted."""
    domains = {client.partition("/")[0] for client in roster.sites}
    return sorted(domains)


def hold_target(name: str, data: Any, shape: Sequence[int], are_images: bool) -> None:
    """Keeps the unseen domain's Dataset in this process, in the form of the clients' data."""
    held = hold(name, None, data)
    refuse_other_shape(name, held.shape, shape)
    HERE[name] = held.in_form(are_images)


def agreed(introductions: Mapping[str, JsonTable], asked: Asked) -> JsonTable:
    """Returns what all clients say of themselves.

    Raises UserError when they differ, or when the server asks for something else.
    """
    first, facts = next(iter(introductions.items()))
    settings = facts["settings"]
    for client, other in introductions.items():
        method = other["method"]
        if method != asked.method:
            raise UserError(f"client {client!r} runs {method!r}, and the server {asked.method!r}")
        refuse_other_shape(client, other["shape"], facts["shape"])
        name, values = first_difference(settings, other["settings"])
        if name:
            raise UserError(f"clients {first!r} and {client!r} differ in {name}: {values}")
    for name, value in settings.items():
        of_server = asked.settings.get(name, value)
        if of_server != value:
            raise UserError(f"{name} is {value} in fedsim.client_app, and {of_server} in fedsim.strategy")
    are_images = all(other["images"] for other in introductions.values())
    return {**facts, "images": are_images}


def first_difference(settings: JsonTable, others: JsonTable) -> tuple[str, str]:
    """Returns (name, both values as a text) of the first setting that differs; empty texts where none does."""
    for name in sorted(settings.keys() | others.keys()):
        value = settings.get(name, "the default")
        other = others.get(name, "the default")
        if value != other:
            return name, f"{value} and {other}"
    return "", ""


def refuse_other_shape(client: str, shape: Sequence[int], usual: Sequence[int]) -> None:
    """Raises UserError when the examples of a client have another shape than the others'."""
    shape, usual = list(shape), list(usual)
    if shape != usual:
        raise UserError(f"{client}: its examples have the shape {shape}, the others' {usual}")


def class_of(net: nn.Module) -> str:
    """Returns the class of a module as `module:name`, for the records."""
    kind = type(net)
    return f"{kind.__module__}:{kind.__name__}"


def unseen(target: Target) -> tuple[str, Any]:
    """Returns (name of the unseen domain, its Dataset).

    There is no Dataset where a client holds the domain, and where there is none. Raises UserError for another object.
    """
    if target is None:
        return NO_TARGET, None
    if isinstance(target, str):
        return target, None
    name, data = UNSEEN, target
    if isinstance(target, tuple) and len(target) == 2:
        name, data = target
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise UserError(f"target is {type(data).__name__}; give a Dataset of (input, class), (name, Dataset), or the "
                        "name of a client")  # fmt: skip
    return str(name), data
