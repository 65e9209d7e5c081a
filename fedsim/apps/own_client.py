"""`fedsim.client_app`: fedsim's client as the ClientApp of any Flower app, with the user's own data and network.

    app = fedsim.client_app("gperxan", model=Net, data=load, lr=0.01, epochs=1)

It is the client of a deployed site (fedsim/apps/client.py), whose domain and data come from the user's function.
"""

from fedsim.common.exit_codes import refuse_hidden_packages

refuse_hidden_packages()  # before the first import of `clients` or `strategies`

import json
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsim.apps.client import app as site_app
from fedsim.apps.given import Model, named_model, named_recipe
from fedsim.apps.strategy import app_experiment, refuse_server_settings
from fedsim.common.errors import CLIENT_APP_RAISED, USER_ERROR, UserError, first_line
from fedsim.common.files import of_home
from fedsim.common.values import Json, JsonTable
from fedsim.data.of_apps import HERE, Held, hold
from fedsim.methods.any_client import of_no_app
from fedsim.methods.assembly import build_recipe
from fedsim.methods.recipe import Recipe
from fedsim.settings.experiment import parse_experiment
from fedsim.tensors.records import config_of, configs_of
from strategies.wire.own_apps import DOMAIN, FEDSIM
from strategies.wire.packing import unpack

QUERIES = ("handshake", "collect", "target", "visit", "doubt")
Load = Callable[[Context], tuple[str, Any, Any]]


def client_app(
    method: str | Recipe,
    model: Model,
    data: Load,
    *,
    state: str = "",
    **settings: Json,
) -> ClientApp:
    """A ClientApp that trains as the clients of a method do; the server needs `fedsim.strategy(method, model)`.

    method: as in `fedsim.strategy`, of which it must be the same
    model: the nn.Module, or the class or function that makes it, whose last Linear is the head
    data: a function (context) -> (name of the domain, training Dataset, validation Dataset) of (tensor, class)
    state: the folder for what a client keeps between rounds (its own batch norm, control variates, ...); empty:
    app-state in fedsim's cache, $FEDSIM_CACHE or ~/.cache/fedsim
    settings: of the experiment file, under their names, such as `lr=0.01`; they are those of all clients

    Raises UserError for an unknown method or setting.
    """
    node = Node(named_recipe(method), named_model(model), data, state, settings)
    app = ClientApp()
    app.train()(node.answer)
    app.evaluate()(node.answer)
    for name in QUERIES:
        app.query(name)(node.answer)
    return app


class Node:
    """What the processes of an app's clients do with a message."""

    def __init__(self, method: str, backbone: str, data: Load, state: str, settings: dict[str, Json]) -> None:
        experiment = app_experiment(method, settings)
        refuse_server_settings(settings)
        no_app = of_no_app(build_recipe(experiment))
        if no_app:
            raise UserError(f"{method}: {no_app}, and an app has its own data and network; use fedsim.run")
        self.method = method
        self.backbone = backbone
        self.data = data
        self.settings = settings
        self.state = state or usual_state()
        self._held: dict[int, tuple[str, Held]] = {}  # by node

    def answer(self, message: Message, context: Context) -> Message:
        """Returns the reply to a message.

        It is the introduction before the first round, otherwise the reply of the site's client.
        """
        try:
            name, held = self._open(context)
            message.content = unpack(message.content)
            config = configs_of(message.content).get("config", ConfigRecord())
            if "experiment" in config:
                self._adapt(message)
                return site_app(message, self._site(context, message, name))
            if message.metadata.message_type != "evaluate":
                raise UserError("this ClientApp is fedsim.client_app, and the server is not fedsim.strategy")
        except UserError as error:
            return Message(Error(CLIENT_APP_RAISED, f"{USER_ERROR}{error}"), reply_to=message)
        facts = json.dumps(self._facts(held))
        introduction = ConfigRecord({DOMAIN: name, FEDSIM: facts})
        return Message(RecordDict({"config": introduction}), reply_to=message)

    def _open(self, context: Context) -> tuple[str, Held]:
        """Returns the name and the data of a node, which are read once in a process."""
        node = context.node_id
        if node not in self._held:
            self._held[node] = self._load(context)
        name, held = self._held[node]
        HERE[name] = held
        return name, held

    def _load(self, context: Context) -> tuple[str, Held]:
        """Returns the name and the data that the user's function gives for a node.

        Raises UserError when the function fails or gives something else.
        """
        try:
            given = self.data(context)
        except UserError:
            raise
        except Exception as error:  # the user's own code may raise any error
            kind = type(error).__name__
            raise UserError(f"data(context) failed: {kind}: {first_line(error)}") from error
        message = "data(context) must return (name of the domain, training Dataset, validation Dataset)"
        if not isinstance(given, tuple) or len(given) != 3:
            raise UserError(message)
        name, training, validation = given
        if not isinstance(name, str) or not name:
            raise UserError(message)
        if "/" in name:
            raise UserError(f"data(context) calls the domain {name!r}: give each client a name of its own, without /")
        return name, hold(name, training, validation)

    def _facts(self, held: Held) -> JsonTable:
        """Returns what the server must know of a client before the run can be planned."""
        return {
            "method": self.method,
            "settings": self.settings,
            "shape": list(held.shape),
            "images": held.are_images,
        }

    def _adapt(self, message: Message) -> None:
        """Gives a message the network as this machine names it."""
        config = config_of(message.content)
        config["experiment"] = adapted(str(config["experiment"]), self.backbone)

    def _site(self, context: Context, message: Message, name: str) -> Context:
        """Returns the context of a deployed site with this domain, whose data take the form of the run's."""
        config = config_of(message.content)
        target, are_images = facts_of(str(config["experiment"]))
        HERE[name] = HERE[name].in_form(are_images)
        self._held[context.node_id] = name, HERE[name]
        role = "target" if name == target else "source"
        node_config = {**context.node_config, "domain": name, "role": role, "state-dir": self.state}
        return Context(context.run_id, context.node_id, node_config, context.state, context.run_config)


def usual_state() -> str:
    """Returns the folder for what clients keep between rounds where none is given."""
    cache = of_home(os.environ.get("FEDSIM_CACHE", "~/.cache/fedsim"))
    return str(cache / "app-state")


@lru_cache(maxsize=4)  # every message of a run has the same
def adapted(experiment: str, backbone: str) -> str:
    """Returns the TOML text of an experiment with another backbone."""
    settings = parse_experiment(experiment)
    return settings.replace(model={"backbone": backbone}).toml()


@lru_cache(maxsize=4)
def facts_of(experiment: str) -> tuple[str, bool]:
    """Returns (the unseen domain of an experiment in TOML, whether its examples are images)."""
    settings = parse_experiment(experiment)
    return settings.run.target, not settings.data.shape
