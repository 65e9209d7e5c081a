"""A federation in the middle of round 2 with its real messages and replies. It can be repeated with other replies."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from support import tiny_experiment

from fedsim.apps.client import app
from fedsim.flower.identity import assume_identity, stamp
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import Workspace
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.accept import accept_updates, accept_validations, check_validations
from strategies.base import FedDG
from strategies.model import server_model
from strategies.round import ask_to_train, ask_to_validate, collect, compute_model, open_parts, open_round
from strategies.server import Server
from strategies.unusable import refused_by_sites, take_back
from strategies.wire.round_notes import RoundNotes
from strategies.wire.sites import Site

TOKEN = "0123456789abcdef"


class CannedGrid:
    """A grid that answers with prepared replies, whatever was sent; messages get the ids that the replies answer."""

    def __init__(self, replies: list[Message]) -> None:
        self.replies = replies

    def send_and_receive(self, messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        number(messages)
        return self.replies


@dataclass
class Outcome:
    """The server's state after a phase: everything that a malformed reply must not change."""

    arrays: dict[str, np.ndarray]
    state: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    details: list[dict[str, Any]]
    notes: list[str]

    def differences(self, other: "Outcome", victim: str) -> str:
        """The first difference between two outcomes, without the victim's own row and the notes."""
        mine, theirs = ({name: row for name, row in rows.items() if name != victim} for rows in (self.rows, other.rows))
        compared = {
            "the global model": (self.arrays, other.arrays), "what the server remembers": (self.state, other.state),
            "another client's row": (timeless(mine), timeless(theirs)), "the details": (self.details, other.details),
        }  # fmt: skip
        return next((what for what, pair in compared.items() if not same(*pair)), "")


@dataclass
class Scene:
    """One method's federation: real replies of every phase by client."""

    method: str
    server: Server
    arrays: ArrayRecord
    messages: dict[str, list[Message]] = field(default_factory=dict)
    replies: dict[str, dict[str, Message]] = field(default_factory=dict)

    def play(self, phase: str, replies: list[Message]) -> Outcome:
        """Give the replies of a phase to a copy of the server; returns the outcome.

        In the phase `evaluate` nobody has trained in round 2, whose model is then that of round 1.
        """
        server = copy.copy(self.server)
        server.state = copy.deepcopy(self.server.state)
        server.exchange, server.parts = copy.copy(self.server.exchange), copy.copy(self.server.parts)
        server.exchange.state = server.parts.state = server.state
        if phase == "collect":
            server.state.banks = {}
            notes = server.exchange.begin(0)
            collect(server, CannedGrid(replies), server.parts.recipe.banks[0], server.exchange.clients)
            return self.outcome(server, self.arrays, notes)
        notes = server.exchange.begin(2)
        clients = server.exchange.clients
        sent = open_round(server, 2, self.arrays, clients)
        before = server.state.snapshot()
        model = record_to_arrays(self.arrays)
        if phase == "train":
            answers = CannedGrid(replies).send_and_receive(list(ask_to_train(server, "train", sent, clients)))
            updates, sizes = accept_updates(server, answers, model)
            arrays = compute_model(server, CannedGrid([]), self.arrays, updates, sizes, before)
            return self.outcome(server, arrays, notes)
        answers = CannedGrid(replies).send_and_receive(list(ask_to_validate(server, 2, self.arrays, clients)))
        results, failures, complaints = check_validations(server, answers)
        client, reason = refused_by_sites({}, complaints)
        if reason:
            take_back(server, before, reason, client)
        accept_validations(server, results, failures, used=not reason)
        return self.outcome(server, self.arrays, notes)

    def outcome(self, server: Server, arrays: ArrayRecord, notes: RoundNotes) -> Outcome:
        """What a phase has left behind."""
        model = {name: np.array(array) for name, array in record_to_arrays(arrays).items()}
        return Outcome(model, vars(server.state), notes.clients, notes.details, notes.notes)


def build(method: str | dict, folder: Path, recipe: Any = None, extra: Any = None, **sections: dict) -> Scene:
    """The scene of a method, after a real round 1 and with real replies of round 2.

    recipe: changes the server's recipe. extra(client): gives records that are added to the replies.
    """
    assume_identity(1)
    run = {"on_client_failure": "continue", "timeout": 5.0}
    experiment = tiny_experiment(folder, method, rounds=3, run=run, **sections)
    space = Workspace(resolve(experiment))
    run_config = {"experiment": experiment.toml(), "state-dir": "", "token": TOKEN}
    strategy = FedDG(recipe(space.recipe) if recipe else space.recipe, experiment, space.places, run_config)
    server = strategy.server
    server.parts.model = server_model(space.net, space.places, space.plan.build_net, space.device)
    server.exchange.sites = {
        name: Site(name, node, space.client(name, "").data.examples)
        for node, name in enumerate(space.plan.clients, start=2)
    }
    scene = Scene(experiment.method_name, server, state_to_record(space.net.state_dict()))

    def answers(messages: list[Message]) -> dict[str, Message]:
        number(messages)
        replies = {}
        for message in messages:
            client = message.content["config"]["client"]
            replies[client] = app(message, Context(1, message.metadata.dst_node_id, {}, RecordDict(), {}))
            if extra and message.metadata.message_type == "train":
                replies[client].content.update(extra(client))
        return replies

    exchange, clients = server.exchange, server.exchange.clients
    exchange.begin(0)
    for bank in [bank for bank in server.parts.recipe.banks if bank.when == "once"]:
        open_parts(server, 0, record_to_arrays(scene.arrays), clients, training=False)
        scene.messages["collect"] = list(exchange.messages("collect", None, clients, bank=bank.name))
        scene.replies["collect"] = answers(scene.messages["collect"])
        collect(server, CannedGrid(list(scene.replies["collect"].values())), bank, clients)
    for round in (1, 2):
        exchange.begin(round)
        sent = open_round(server, round, scene.arrays, clients)
        scene.messages["train"] = list(ask_to_train(server, "train", sent, clients))
        scene.replies["train"] = answers(scene.messages["train"])
        if round == 1:
            before, model = server.state.snapshot(), record_to_arrays(scene.arrays)
            updates, sizes = accept_updates(server, scene.replies["train"].values(), model)
            scene.arrays = compute_model(server, CannedGrid([]), scene.arrays, updates, sizes, before)
    scene.messages["evaluate"] = list(ask_to_validate(server, 2, scene.arrays, clients))
    scene.replies["evaluate"] = answers(scene.messages["evaluate"])
    return scene


def number(messages: list[Message]) -> None:
    """Give messages ids by their position, which are the same each time."""
    for place, message in enumerate(messages):
        stamp(message, f"m{place}")


def timeless(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: value for key, value in row.items() if "seconds" not in key} for name, row in rows.items()}


def same(a: Any, b: Any) -> bool:
    """Whether nested tables and arrays are equal to the last bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b
