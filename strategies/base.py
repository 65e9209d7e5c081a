"""The order of a round: Flower's message strategy, with clients known by name and parts that can be exchanged.

configure_train (share, banks) -> clients train -> aggregate_train (check, weigh, fuse, banks, refine) ->
configure_evaluate -> clients validate -> aggregate_evaluate -> the server app evaluates the unseen domain.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedsim.common.seeding import seed_library
from fedsim.common.tasks import CLASSIFICATION
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.records import Config
from strategies.banks.checks import layout_of, owned
from strategies.computation import Computation
from strategies.participation import trainers, validators
from strategies.parts import ArrayDict, Arrays, Bank, Entries, Place, RefusedUpdateError
from strategies.recipe import ServerRecipe
from strategies.server_parts import ServerParts
from strategies.state import ServerState
from strategies.stored import Storage
from strategies.wire.arrivals import Arrivals
from strategies.wire.cuts import taken
from strategies.wire.exchange import Encoder, Exchange
from strategies.wire.guard import Guard
from strategies.wire.membership import implausible
from strategies.wire.reply_checks import check_collected, check_validation, one_line
from strategies.wire.reply_limits import records_over_limit
from strategies.wire.round_notes import RoundNotes
from strategies.wire.target_site import Asked
from strategies.wire.update_limit import model_norm
from strategies.wire.visits import Visits


class FedDG(FedAvg):
    """Federated training by the server parts of a recipe.

    `exchange` sends messages and checks replies, `parts` computes, and `state` is everything that a checkpoint needs
    beside the global arrays. `places` says which state entries are shared, and `metric` is what clients measure in
    their validation.
    """

    def __init__(
        self,
        recipe: ServerRecipe,
        experiment: Experiment,
        places: Mapping[str, Place],
        run_config: Config,
        metric: str = CLASSIFICATION.metric,
    ) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
        self.experiment = experiment
        self.places = places
        self.state = ServerState()
        self.parts = ServerParts(recipe, experiment, places, self.state)
        self.exchange = Exchange(experiment, run_config, self.state, metric)
        self.visits = self.parts.visits = Visits(self.exchange)
        self.guard = Guard(experiment.run.update_limit)
        self.computation = Computation(experiment, self.parts, self.exchange, self.guard)
        self.storage = Storage()  # of the replies' tensors
        self.target: Asked | None = None  # who evaluates the unseen domain while the clients validate
        self.finished_rounds = 0
        self._drawn: list[str] = []  # clients that train in this round
        self._saved: ArrayDict = {}  # the global model, as evaluated and saved
        self._phase = "train"
        self._record = ArrayRecord()  # the model of the round, in the record that Flower's loop holds

    @property
    def recipe(self) -> ServerRecipe:
        """The parts of the method."""
        return self.parts.recipe

    @property
    def log(self) -> RoundNotes:
        """The record of the current round."""
        return self.exchange.log

    def resume(self, round: int, state: ServerState) -> None:
        """Continues after a round, with the server's state of that time."""
        self.finished_rounds = self.exchange.saved_round = round
        self.parts.require_places(state)
        self.state = self.parts.state = self.exchange.state = state

    def summary(self) -> None:
        """Does nothing, because the run's records hold the results."""

    # --- one round ------------------------------------------------------------------------------------------------

    def before_rounds(self, grid: Grid, arrays: ArrayRecord) -> ArrayRecord:
        """Fills the banks, then runs the step part's prelude (CSAC's acquisition); returns the arrays of round 0."""
        self.exchange.log = RoundNotes(0)
        clients, prelude = self.exchange.clients, self.recipe.prelude
        self._begin(0, record_to_arrays(arrays), clients, training=False)
        for bank in [bank for bank in self.parts.banks("once") if bank.contributed]:
            self._collect(bank, grid, 0, None, clients)
        if not prelude:
            return arrays
        self._phase = prelude
        messages = self._train_messages(0, self._open(0, arrays, clients), clients)
        arrays = self._aggregate(grid.send_and_receive(messages, timeout=self.experiment.run.timeout))
        self._phase = "train"
        return arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per drawn client, made when it is sent: shared tensors, bank records, config.

        Banks `before` training come first."""
        round, self.visits.grid = self.finished_rounds + 1, grid
        self.exchange.log = RoundNotes(round)
        self._drawn = trainers(self.experiment.train, self.exchange.clients, self.experiment.run.seed, round)
        down = self._open(round, arrays, self._drawn)
        for bank in self.parts.banks("before"):
            self._drawn = self._collect(bank, grid, round, down if bank.with_model else None, self._drawn)
            self.parts.drawn = self._drawn
        return self._train_messages(round, down, self._drawn)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord | None]:
        """Checks, weighs, fuses and refines the replies; returns the global model of the round."""
        return self._aggregate(replies), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The clients of `train.evaluate_clients` validate the aggregated model with its averages of batch norm."""
        record = self._placed(arrays, ("shared", "upload"))
        run, train, round = self.experiment.run, self.experiment.train, self.log.round
        clients = validators(train, self.exchange.clients, self._drawn, run.seed, round)
        messages = self.exchange.messages("evaluate", round, record, clients)
        return chain(self.target.messages(round, arrays, self.wanted_entries()) if self.target else (), messages)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The unweighted mean over the clients. The target domain is never used to select a model."""
        if self.target:
            replies = self.target.others(replies)
        found = self.exchange.sift(self.guard.heard(check_validation), replies, "validation refused")
        gone = self._taken_back()
        if self.target:
            self.target.take(used=not gone)
        if gone:
            self.exchange.settle_silent(*found)
            return None
        for client, columns in self.exchange.settle(*self._plausible(*found)).items():
            self.log.row(client).update(columns)
        return None

    def _plausible(self, results: dict[str, dict], failures: dict) -> tuple[dict[str, dict], dict]:
        """The results and failures of a validation, where a number of examples is a failure if it is out of proportion
        to those of the others and to the client's own training examples."""
        limit, sites = self.experiment.run.examples_limit, self.exchange.sites
        counts = {client: int(columns["validation_examples"]) for client, columns in results.items()}
        for client, reason in implausible(counts, limit).items():
            if counts[client] > limit * sites[client].examples:
                failures = {**failures, client: (f"validation refused: {reason}", "")}
                results = {other: columns for other, columns in results.items() if other != client}
        return results, failures

    def wanted_entries(self) -> Entries:
        """The entries of the bank that the unseen domain's inference rule needs, by client; empty when it needs
        none."""
        return self.state.banks.get(self.recipe.infer.bank, {})

    # --- what the server sends ----------------------------------------------------------------------------------------

    def _placed(self, arrays: ArrayRecord, places: Sequence[Place]) -> ArrayRecord:
        """The tensors with these places."""
        names = [name for name in arrays if self.places[name] in places]
        return arrays if len(names) == len(arrays) else ArrayRecord({name: arrays[name] for name in names})

    def _begin(self, round: int, model: Arrays, drawn: Sequence[str], training: bool) -> None:
        """Tells the parts of the round, and what the sites said in the handshake."""
        self.parts.class_counts = {name: site.class_counts for name, site in self.exchange.sites.items()}
        self.parts.open(round, model, self.exchange.clients, drawn, training)

    def _open(self, round: int, arrays: ArrayRecord, drawn: Sequence[str]) -> ArrayRecord:
        """Begins a round; returns the tensors that are sent to its clients."""
        self._saved = record_to_arrays(arrays)
        self._begin(round, self._saved, drawn, training=self._phase == "train")
        self.computation.begin()
        if self.parts.start is not self._saved:
            arrays = state_to_record(self.parts.start)
        return self._placed(arrays, ("shared",))

    def _train_messages(self, round: int, down: ArrayRecord, drawn: Sequence[str]) -> Iterator[Message]:
        shared, handed = record_to_arrays(down), self._records()

        def records(client: str) -> dict[str, ArrayRecord]:
            cut = self.parts.cut(client)
            own = {"arrays": state_to_record(taken(shared, cut))} if cut else {}
            return own | handed(client)

        return self.exchange.messages(self._phase, round, down, drawn, records)

    def _records(self, names: Sequence[str] | None = None) -> Callable[[str], dict[str, ArrayRecord]]:
        """A function that gives the records of the banks (or of those named) that a client gets now."""
        handed, encoder = self.parts.handed_out(names), Encoder()
        return lambda client: {name: encoder.record(arrays) for name, arrays in handed(client).items()}

    # --- what the server receives -------------------------------------------------------------------------------------

    def _collect(
        self, bank: Bank, grid: Grid, round: int, down: ArrayRecord | None, clients: Sequence[str]
    ) -> list[str]:
        """Asks clients for their contributions to a bank, with the model if they need it; returns who contributed."""
        exchange, more = self.exchange, {"delivered": list(clients)} if bank.when == "after" else {}
        records = self._records(bank.reads)
        messages = exchange.messages("collect", round, down, clients, records, bank=bank.name, **more)
        replies = grid.send_and_receive(messages, timeout=self.experiment.run.timeout)
        views = self.parts.views([bank])
        refusal = f"{bank.name} refused"
        found = exchange.sift(
            check_collected, replies, refusal, lambda expected: replace(expected, banks=(bank,), views=views), owned
        )
        entries = exchange.settle(*found)
        layouts = {client: layout_of(arrays) for client, arrays in entries.items()}
        odd = self.parts.odd(bank, layouts)
        norms, refused = compared_norms(bank, {name: own for name, own in entries.items() if name not in odd})
        odd |= refused | records_over_limit(norms, self.parts.start, self.guard.limit)
        while True:
            for client, reason in odd.items():
                exchange.fail(client, f"{bank.name} refused: {reason}")
                del entries[client]
            try:
                exchange.log.take(self.parts.collected(bank, entries))
                return list(entries)
            except RefusedUpdateError as error:
                if error.client not in entries:
                    raise
                odd = {error.client: one_line(error.reason)}

    def _aggregate(self, replies: Iterable[Message]) -> ArrayRecord:
        """The model of the round. Without an accepted reply it stays as it was."""
        sent_up = {name: array for name, array in self._saved.items() if self.places[name] in ("shared", "upload")}
        updates = Arrivals(self.exchange, self.guard, self.parts, self.storage).take(replies, sent_up)
        started = time.perf_counter()
        seed_library(self.experiment.run.seed, "server", self.log.round)
        for bank in self.parts.banks("after") if updates and self.parts.training else []:
            assert self.visits.grid is not None  # set when the round was configured
            self._collect(bank, self.visits.grid, self.log.round, None, [update.client for update in updates])
        fused = self.computation.fused(updates)
        self.storage.clear()
        self._record = state_to_record({**self._saved, **fused})
        self.log.aggregation_seconds += time.perf_counter() - started
        return self._record

    def _taken_back(self) -> bool:
        """Restores the previous model when most clients cannot use the new one; the client with the outlying update has
        failed. The unseen domain's site is not asked, because its images may decide nothing."""
        client, reason = self.guard.useless(self.exchange.asked)
        if reason:
            self.guard.put_back(self._record, state_to_record(self._saved))
            self.computation.undo(client, reason)
        return bool(reason)


def compared_norms(bank: Bank, entries: Mapping[str, Arrays]) -> tuple[dict[str, float], dict[str, str]]:
    """The norms of contributions by client, and the clients whose contribution cannot be compared, with the reason."""
    norms: dict[str, float] = {}
    refused: dict[str, str] = {}
    for client, own in entries.items():
        try:
            norms[client] = model_norm(bank.compared(own))
        except RefusedUpdateError as error:
            refused[client] = one_line(error.reason)
    return norms, refused
