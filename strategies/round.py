"""One round of the federation, from the draw of its clients to the score of its model.

The round is read from top to bottom. What lasts longer than a round is in the `Server`, what a round makes is a
`RoundResult`, and everything between is a local variable. The steps:

    draw -> banks before training -> train -> accept -> banks after training -> compute (or take back) -> validate
    -> keep or take back -> score
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedsim.common.seeding import seed_library
from fedsim.common.values import Row
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.accept import accept_contributions, accept_updates, accept_validations, check_validations
from strategies.compute import compute
from strategies.participation import trainers, validators
from strategies.parts import ArrayDict, Bank, Update
from strategies.server import Server
from strategies.state import Snapshot
from strategies.unusable import end_if_lost, refused_by_sites, take_back
from strategies.wire.cuts import crop
from strategies.wire.exchange import Encoder
from strategies.wire.round_notes import RoundNotes
from strategies.wire.target_site import TargetScore


@dataclass(frozen=True)
class RoundResult:
    """What a round has made.

    number: the round; 0 is what comes before the first one
    model: all tensors that travel; those of the round before when the round was taken back
    validation: the columns of clients.csv by client, of those that validated the model
    target: the score on the unseen domain
    notes: a row for every client (status, bytes, metrics), and the details and lines of the round
    """

    number: int
    model: ArrayRecord
    validation: Mapping[str, Row]
    target: TargetScore
    notes: RoundNotes

    @property
    def accepted(self) -> list[str]:
        """The clients whose replies made the model."""
        return [client for client, row in self.notes.clients.items() if "weight" in row]

    @property
    def failures(self) -> dict[str, str]:
        """The reason of every client of which something was not used."""
        return {client: row["status"] for client, row in self.notes.clients.items() if row["status"] != "ok"}


def play_round(server: Server, grid: Grid, number: int, model: ArrayRecord) -> RoundResult:
    """Plays a round that starts from `model`; a client's failure may end the run with its error.

    `compute_model` may have taken the round back (`take_back`). The clients then validate the model of before.
    """
    exchange, parts = server.exchange, server.parts

    notes = exchange.begin(number)
    clients = draw(server, number)
    sent = open_round(server, number, model, clients)
    before = server.state.snapshot()
    for bank in parts.banks("before"):
        clients = parts.drawn = collect(server, grid, bank, clients, sent if bank.with_model else None)

    replies = send(server, grid, ask_to_train(server, "train", sent, clients))
    updates, sizes = accept_updates(server, replies, record_to_arrays(model))
    if server.watch:
        server.watch(number, record_to_arrays(model), updates)
    with computing(server):
        for bank in parts.banks("after") if updates else []:
            collect(server, grid, bank, [update.client for update in updates])
        new_model = compute_model(server, grid, model, updates, sizes, before)

    answers = send(server, grid, ask_to_validate(server, number, new_model, clients))
    results, failures, complaints = check_validations(server, answers)
    client, reason = refused_by_sites(sizes, complaints)
    if reason:
        take_back(server, before, reason, client)
        new_model = model
    validation = accept_validations(server, results, failures, used=not reason)
    end_if_lost(server)
    return RoundResult(number, new_model, validation, score(server, new_model), notes)


def play_prelude(server: Server, grid: Grid, model: ArrayRecord) -> RoundResult:
    """Fills the banks that are filled once, and plays the step part's prelude (CSAC's acquisition); this is round 0."""
    exchange, parts = server.exchange, server.parts
    notes, clients, prelude = exchange.begin(0), exchange.clients, parts.recipe.prelude
    open_parts(server, 0, record_to_arrays(model), clients, training=False)
    for bank in parts.banks("once"):
        if bank.contributed:
            collect(server, grid, bank, clients)
    if prelude:
        sent = open_round(server, 0, model, clients, training=False)
        before = server.state.snapshot()
        replies = send(server, grid, ask_to_train(server, prelude, sent, clients))
        updates, sizes = accept_updates(server, replies, record_to_arrays(model))
        if server.watch:
            server.watch(0, record_to_arrays(model), updates)
        with computing(server):
            model = compute_model(server, grid, model, updates, sizes, before)
    target = server.target.ask(grid, model, server.wanted_entries()) if server.target else TargetScore()
    return RoundResult(0, model, {}, target, notes)


# --- the steps of a round -------------------------------------------------------------------------------------------


def draw(server: Server, number: int) -> list[str]:
    """The clients that train in a round."""
    return trainers(server.experiment.train, server.exchange.clients, server.experiment.run.seed, number)


def open_parts(server: Server, number: int, model: ArrayDict, clients: Sequence[str], training: bool) -> None:
    """Tells the parts of the round that begins, and what the sites said in the handshake."""
    exchange, parts = server.exchange, server.parts
    parts.class_counts = {name: site.class_counts for name, site in exchange.sites.items()}
    parts.open(number, model, exchange.clients, clients, training)


def open_round(
    server: Server, number: int, model: ArrayRecord, clients: Sequence[str], training: bool = True
) -> ArrayRecord:
    """Begins a round with these clients; returns the tensors that are sent to them."""
    arrays = record_to_arrays(model)
    open_parts(server, number, arrays, clients, training)
    start = model if server.parts.start is arrays else state_to_record(server.parts.start)
    return server.placed(start, "shared")


def collect(
    server: Server, grid: Grid, bank: Bank, clients: Sequence[str], model: ArrayRecord | None = None
) -> list[str]:
    """Asks clients for their contributions to a bank, with the model if there is one; returns who contributed."""
    delivered = {"delivered": list(clients)} if bank.when == "after" else {}
    records = records_of_banks(server, bank.reads)
    messages = server.exchange.messages("collect", model, clients, records, bank=bank.name, **delivered)
    return accept_contributions(server, bank, send(server, grid, messages))


def send(server: Server, grid: Grid, messages: Iterable[Message]) -> Iterable[Message]:
    """Sends messages, each when it is its turn; the replies, as they come within `run.timeout`."""
    return grid.send_and_receive(messages, timeout=server.experiment.run.timeout)


def ask_to_train(server: Server, phase: str, model: ArrayRecord, clients: Sequence[str]) -> Iterable[Message]:
    """One message to each client, made when it is sent: the model or its part of it, and the records of the banks."""
    shared, of_banks = record_to_arrays(model), records_of_banks(server)

    def records(client: str) -> dict[str, ArrayRecord]:
        cut = server.parts.cut(client)
        part = {"arrays": state_to_record(crop(shared, cut))} if cut else {}
        return part | of_banks(client)

    return server.exchange.messages(phase, model, clients, records)


def records_of_banks(server: Server, names: Sequence[str] | None = None) -> Callable[[str], dict[str, ArrayRecord]]:
    """A function that gives the records of the banks (or of those named) that a client gets now."""
    handed_out, encoder = server.parts.handed_out(names), Encoder()
    return lambda client: {name: encoder.record(arrays) for name, arrays in handed_out(client).items()}


@contextmanager
def computing(server: Server) -> Iterator[None]:
    """Within this block the server computes: its time is noted, and what libraries draw begins anew in each round."""
    notes, started = server.exchange.notes, time.perf_counter()
    seed_library(server.experiment.run.seed, "server", notes.round)
    yield
    notes.aggregation_seconds += time.perf_counter() - started


def compute_model(
    server: Server,
    grid: Grid,
    model: ArrayRecord,
    updates: Sequence[Update],
    sizes: Mapping[str, float],
    before: Snapshot,
) -> ArrayRecord:
    """The global model after these updates; its tensors are those of before when `compute` takes the round back."""
    fused = compute(server, grid, updates, sizes, before)
    server.storage.clear()
    return state_to_record({**record_to_arrays(model), **fused})


def ask_to_validate(server: Server, number: int, model: ArrayRecord, trained: Sequence[str]) -> Iterable[Message]:
    """The messages to the clients that validate the model of a round, after those of the unseen domain.

    trained: the clients that trained in the round
    """
    train, seed = server.experiment.train, server.experiment.run.seed
    clients = validators(train, server.exchange.clients, trained, seed, number) if server.exchange.validates else []
    messages = server.exchange.messages("evaluate", server.placed(model, "shared", "upload"), clients)
    if not server.target:
        return messages
    return chain(server.target.messages(number, model, server.wanted_entries()), messages)


def score(server: Server, model: ArrayRecord) -> TargetScore:
    """The score of a round's model on the unseen domain, which decides nothing."""
    return server.target.score(model, server.wanted_entries()) if server.target else TargetScore()
