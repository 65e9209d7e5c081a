"""The order of a round: Flower's message strategy, with clients known by name and exchangeable parts.

configure_train (share, banks) -> clients train -> aggregate_train (check, weigh, fuse, banks, refine)
-> configure_evaluate -> clients validate -> aggregate_evaluate -> the server app evaluates the unseen domain.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedsim.arrays import all_finite, record_to_arrays, state_to_record
from fedsim.errors import ClientFailedError
from fedsim.experiment import Experiment
from fedsim.part import Part
from fedsim.seeding import numpy_rng, seed_library
from strategies.banks.checks import layout_of, misfit, odd_shapes, owned
from strategies.model import ServerModel
from strategies.parts import SERVER, Bank, Broadcast, Place, Refine, RefusedUpdateError, ServerRound, Update
from strategies.state import ServerState
from strategies.wire.exchange import Exchange
from strategies.wire.handshake import Roster
from strategies.wire.reply_checks import check_collected, check_update, check_validation, manifest, one_line
from strategies.wire.round_log import RoundLog
from strategies.wire.target_site import TargetSite


class FedDG(FedAvg):
    """Federated training by a recipe's server parts.

    `exchange` sends messages and judges replies; `state` is all that a checkpoint needs beside the global arrays;
    `model` says what the global arrays are; `places` says which state entries are shared.
    """

    def __init__(
        self, recipe: Any, experiment: Experiment, places: Mapping[str, Place], run_config: dict[str, str]
    ) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
        self.recipe = recipe
        self.experiment = experiment
        self.places = places
        self.model = ServerModel()
        self.state = ServerState()
        self.exchange = Exchange(experiment, run_config, self.state)
        self.target_site: TargetSite | None = None  # the unseen domain's, when the server does not evaluate itself
        self.finished_rounds = 0
        self._saved: dict[str, np.ndarray] = {}  # the model as evaluated and saved
        self._start: dict[str, np.ndarray] = {}  # the model from which the clients start: the same, unless refined
        self._drawn: list[str] = []
        self._phase = "train"

    @property
    def log(self) -> RoundLog:
        """Record of the round in progress."""
        return self.exchange.log

    def join(self, roster: Roster) -> None:
        """Wait for the sites (`run.wait_for_sites`); ClientFailedError names those without which there is no run."""
        self.exchange.join(roster)
        self.target_site = TargetSite(self.exchange, roster) if roster.target else None

    def resume(self, round: int, state: ServerState) -> None:
        """Go on after a round, with what the server remembered then."""
        self.finished_rounds = self.exchange.saved_round = round
        self.state = self.exchange.state = state

    def summary(self) -> None:
        """Nothing: the records say it."""

    # --- one round ------------------------------------------------------------------------------------------------

    def before_rounds(self, grid: Grid, arrays: ArrayRecord) -> ArrayRecord:
        """Phase 0: the banks, then the step part's prelude (CSAC's acquisition); returns the arrays of round 0."""
        self.exchange.log = RoundLog(0)
        self._saved = self._start = record_to_arrays(arrays)
        for bank in self._banks(when="once"):
            self._collect(bank, grid)
        if not self.recipe.client.prelude:
            return arrays
        self._phase = self.recipe.client.prelude
        messages = self._train_messages(0, arrays, self.exchange.clients)
        arrays = self._aggregate(grid.send_and_receive(messages, timeout=self.experiment.run.timeout))
        self._phase = "train"
        return arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """One message per drawn client: shared tensors, bank records, config."""
        round = self.finished_rounds + 1
        self.exchange.log = RoundLog(round)
        return self._train_messages(round, arrays, self._draw(round))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord | None]:
        """Check, weigh, fuse and refine the replies; the global model of the round."""
        return self._aggregate(replies), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Every source client validates the aggregated model, its batch-norm averages included."""
        known = [name for name in arrays if self.places[name] != "local"]
        record = arrays if len(known) == len(arrays) else ArrayRecord({name: arrays[name] for name in known})
        messages = self.exchange.messages("evaluate", self.log.round, record, self.exchange.clients, {})
        return messages + (self.target_messages(self.log.round, arrays) if self.target_site else [])

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Unweighted mean over the clients (selection never sees the target; core.md R7)."""
        if self.target_site:
            replies = self.target_site.take(replies)
        for client, columns in self.exchange.judge(check_validation, replies, "validation refused").items():
            self.log.row(client).update(columns)
        return None

    # --- the unseen domain ------------------------------------------------------------------------------------------

    def wanted_entries(self) -> Mapping[str, Mapping[str, np.ndarray]]:
        """Entries of the bank that the inference rule wants, by client; empty when it wants none."""
        return self.state.banks.get(self.recipe.infer.bank, {})

    def target_messages(self, round: int, arrays: ArrayRecord) -> list[Message]:
        """The message to the site that holds the unseen domain."""
        return self.target_site.messages(round, arrays, self.wanted_entries())

    # --- what goes down ---------------------------------------------------------------------------------------------

    def _draw(self, round: int) -> list[str]:
        clients, count = self.exchange.clients, self.experiment.train.clients_per_round
        if count == 0 or count >= len(clients):
            return clients
        drawn = numpy_rng(self.experiment.run.seed, "clients", round).choice(len(clients), count, replace=False)
        return [clients[index] for index in sorted(drawn)]

    def _train_messages(self, round: int, arrays: ArrayRecord, clients: Sequence[str]) -> list[Message]:
        self._saved, self._drawn = record_to_arrays(arrays), list(clients)
        self._start = self._model_to_start_from(self._saved)
        if self._start is not self._saved:
            arrays = state_to_record(self._start)
        server = self._server()
        for bank in self._broadcasts():
            if bank.name not in self.state.banks:
                self.state.banks[bank.name] = self._made(bank, server)
        shared = [name for name in arrays if self.places[name] == "shared"]
        down = arrays if len(shared) == len(arrays) else ArrayRecord({name: arrays[name] for name in shared})
        banks = {bank.name: self._handed_out(bank, clients, server) for bank in self.recipe.banks}
        return self.exchange.messages(self._phase, round, down, clients, banks)

    def _model_to_start_from(self, model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The model from which the clients start: the saved one, unless a refining part goes on with another."""
        start = model
        if self._phase == "train":
            for key, part in reversed(self._refining()):
                start = part.start(start, self._view(self._server(), key))
        return start

    def _handed_out(self, bank: Bank, clients: Sequence[str], server: ServerRound) -> dict[str, ArrayRecord]:
        """The bank's record for each client that gets one now: of a bank that comes once, those who lack it."""
        kept = self.state.handed.setdefault(bank.name, []) if bank.when == "once" else []
        entries, view = self.state.banks.get(bank.name, {}), self._view(server, bank_key(bank))
        handed = {client: bank.hand_out(entries, client, view) for client in clients if client not in kept}
        return {client: state_to_record(arrays) for client, arrays in handed.items() if arrays is not None}

    # --- what comes up ------------------------------------------------------------------------------------------------

    def _collect(self, bank: Bank, grid: Grid) -> None:
        """Ask every client for its contribution to a bank, once."""
        exchange = self.exchange
        messages = exchange.messages("collect", 0, None, exchange.clients, {}, bank=bank.name)
        replies = grid.send_and_receive(messages, timeout=self.experiment.run.timeout)
        views = {bank.name: self._view(self._server(), bank_key(bank))}
        collected = exchange.judge(check_collected, replies, f"{bank.name} refused", banks=(bank,), views=views)
        entries = {client: owned(arrays) for client, arrays in collected.items()}
        for client, reason in self._odd(bank, entries).items():
            exchange.fail(client, f"{bank.name} refused: {reason}")
            del entries[client]
        self.state.banks[bank.name] = entries

    def _odd(self, bank: Bank, entries: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, str]:
        """Clients whose contributions are unlike the others', with the reason; the layout that is right is kept."""
        if not bank.uniform or not entries:
            return {}
        odd = odd_shapes(entries, self.state.layouts.get(bank.name, ""))
        for client in entries.keys() - odd.keys():
            self.state.layouts.setdefault(bank.name, layout_of(entries[client]))
        return odd

    def _aggregate(self, replies: Iterable[Message]) -> ArrayRecord:
        """The model of the round; with no reply that counts it stays as it was (core.md R1)."""
        started = time.perf_counter()
        seed_library(self.experiment.run.seed, "server", self.log.round)
        updates = self._updates(replies)
        fused = self._fused(updates)
        self.log.aggregation_seconds += time.perf_counter() - started
        return state_to_record({**self._saved, **fused})

    def _updates(self, replies: Iterable[Message]) -> list[Update]:
        """The replies that pass the checks of the wire, of the banks, and of what all clients have in common."""
        banks = self._contributed()
        expected = {
            "shapes": manifest({name: array for name, array in self._saved.items() if self.places[name] != "local"}),
            "nonnegative": self.model.nonnegative,
            "banks": banks,
            "views": {bank.name: self._view(self._server(), bank_key(bank)) for bank in banks},
            "metrics": self._needs(),
        }
        updates = self.exchange.judge(check_update, replies, "reply refused", **expected)
        for bank in banks:
            for client, reason in self._odd(bank, {name: u.records[bank.name] for name, u in updates.items()}).items():
                self.exchange.fail(client, f"reply refused: {bank.name}: {reason}")
                del updates[client]
        return list(updates.values())

    def _fused(self, updates: list[Update]) -> dict[str, np.ndarray]:
        """The new tensors, or none; whom a part refuses is left out, and the round computed again from its beginning.

        A model that is not finite is dropped with all that its round would have changed (core.md R2).
        """
        saved = self.state.saved_parts()
        while updates:
            try:
                server, fused = self._computed(updates)
            except RefusedUpdateError as error:
                if error.client not in [update.client for update in updates]:
                    raise
                self.exchange.fail(error.client, f"reply refused: {one_line(error.reason)}")
                updates = [update for update in updates if update.client != error.client]
                self.state.restore_parts(saved)
                continue
            self._note_down(updates, server)
            if broken := not_finite(fused):
                self.state.restore_parts(saved)
                self._drop(f"the aggregate of {broken!r} is not finite")
                return {}
            self.state.banks = dict(server.banks)
            return fused
        self.log.note("no client delivered; the model stays as it was")
        return {}

    def _computed(self, updates: list[Update]) -> tuple[ServerRound, dict[str, np.ndarray]]:
        """Weigh, fuse, merge the banks, refine, make the broadcasts: the round with its weights and banks, the tensors.

        Nothing but the parts' own states is changed.
        """
        server, recipe, training = self._server(updates), self.recipe, self._phase == "train"
        server.weights = recipe.weights.weigh(updates, self._view(server, "weights"))
        fused = recipe.fuse.fuse(updates, server.weights, self._view(server, "fuse"))
        fused = same_layout(recipe.fuse, fused, updates[0].arrays)
        for bank in [bank for bank in self._banks(when="round") if training and not isinstance(bank, Broadcast)]:
            view = self._view(server, bank_key(bank))
            entries = {update.client: owned(bank.gather(update, view)) for update in updates}
            server.banks = {**server.banks, bank.name: bank.merge(server.banks.get(bank.name, {}), entries, view)}
        for key, part in self._refining() if training else []:
            if not_finite(fused):
                return server, fused
            fused = same_layout(part, part.refine(fused, self._view(server, key)), fused)
        server.current = self._model_to_start_from({**self._saved, **fused})
        for bank in self._broadcasts():
            server.banks = {**server.banks, bank.name: self._made(bank, server)}
        return server, fused

    def _drop(self, reason: str) -> None:
        """The round's model is of no use: the end of the run, or a line in its record."""
        if self.experiment.run.on_client_failure == "stop":
            raise ClientFailedError(f"round {self.log.round}: {reason}")
        self.log.note(f"{reason}; the model stays as it was")

    def _note_down(self, updates: Sequence[Update], server: ServerRound) -> None:
        """What the round was, for its records, and what the clients keep from now on."""
        for update in updates:
            self.log.row(update.client).update(examples=update.examples, **update.metrics)
            if update.stored:
                self.state.stored[update.client] = self.log.round
        for bank in self._banks(when="once"):
            handed = self.state.handed.setdefault(bank.name, [])
            handed += [update.client for update in updates if update.client not in handed]
        for client, weight in server.weights.items():
            self.log.row(client)["weight"] = float(weight)
        self.log.details += server.details
        for client, columns in server.client_columns.items():
            self.log.row(client).update(columns)

    # --- the recipe's server parts ------------------------------------------------------------------------------------

    def _banks(self, when: str) -> list[Bank]:
        return [bank for bank in self.recipe.banks if bank.when == when]

    def _broadcasts(self) -> list[Broadcast]:
        return [bank for bank in self.recipe.banks if isinstance(bank, Broadcast)]

    def _contributed(self) -> tuple[Bank, ...]:
        """Banks whose contributions come with this phase's replies."""
        return tuple(bank for bank in self._banks(when="round") if bank.contributed and self._phase == "train")

    def _refining(self) -> list[tuple[str, Refine]]:
        return [(f"refine.{place}.{type(part).__name__}", part) for place, part in enumerate(self.recipe.refine)]

    def _needs(self) -> set[str]:
        """Metrics without which a reply is of no use."""
        parts = [self.recipe.weights, self.recipe.fuse, *self.recipe.banks, *self.recipe.refine]
        return {name for part in parts for name in part.needs} if self._phase == "train" else set()

    def _server(self, updates: Sequence[Update] = ()) -> ServerRound:
        """The round in progress, without any part's own state."""
        return ServerRound(
            round=self.log.round,
            rounds=self.experiment.train.rounds,
            clients=self.exchange.clients,
            previous=self._start,
            drawn=self._drawn,
            updates=updates,
            current=self._start,
            banks=self.state.banks,
            places=self.places,
            kinds=self.model.kinds,
            parameters=self.model.parameters,
            seed=self.experiment.run.seed,
            train=self.experiment.train,
            device=self.model.device,
            build_net=self.model.build_net,
        )

    def _view(self, server: ServerRound, key: str) -> ServerRound:
        """The round as the part of this key sees it."""
        return server.of_part(*self.state.of_part(key))

    def _made(self, bank: Broadcast, server: ServerRound) -> dict[str, dict[str, np.ndarray]]:
        return {SERVER: owned(bank.make(self._view(server, bank_key(bank))))}


def bank_key(bank: Bank) -> str:
    """Key of a bank's own state."""
    return f"banks.{bank.name}"


def not_finite(arrays: Mapping[str, np.ndarray]) -> str:
    """Name of the first tensor with NaN or infinite values, or an empty string."""
    return next((name for name, array in arrays.items() if not all_finite(array)), "")


def same_layout(part: Part, arrays: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a part returned, if it has the tensors that it should; ValueError names the part: it has a bug."""
    reason = misfit(arrays, like)
    if reason:
        raise ValueError(f"{type(part).__name__} returned tensors that are not the model's: {reason}")
    return dict(arrays)
