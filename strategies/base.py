"""The FedDG strategy: Flower's message strategy with identities by domain, checked replies and exchangeable parts.

Order of one round, as in the design: configure_train (share) -> clients -> aggregate_train (validate, weigh, fuse)
-> configure_evaluate -> clients validate -> aggregate_evaluate -> the server app evaluates the unseen domain.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedsim.arrays import all_finite, record_to_arrays, state_to_record
from fedsim.errors import ClientFailedError
from fedsim.experiment import Experiment
from fedsim.seeding import numpy_rng
from strategies.banks.checks import odd_shapes, owned
from strategies.parts import MIRROR, Bank, Place, ServerRound, Update
from strategies.wire.handshake import NOT_ONLINE, Roster, Site
from strategies.wire.matching import match
from strategies.wire.reply_checks import (
    Expected,
    RejectedReplyError,
    check_collected,
    check_update,
    check_validation,
    client_failure,
    failure_reason,
    judged,
    manifest,
)
from strategies.wire.round_log import RoundLog
from strategies.wire.target_site import TargetSite

T = TypeVar("T")


class FedDG(FedAvg):
    """Federated training by a recipe's server parts.

    `sites` maps client names to Flower nodes (from the handshake); `places` says which state entries are shared;
    `part_states` and `banks` are all that a checkpoint needs beside the global arrays.
    """

    def __init__(
        self, recipe: Any, experiment: Experiment, places: Mapping[str, Place], run_config: dict[str, str]
    ) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
        self.recipe = recipe
        self.experiment = experiment
        self.places = places
        self.run_config = run_config
        self.sites: dict[str, Site] = {}
        self.roster: Roster | None = None
        self.target_site: TargetSite | None = None  # the unseen domain's, when the server does not evaluate itself
        self.part_states: dict[str, dict[str, Any]] = {"weights": {}, "fuse": {}, "banks": {}, "stored": {}}
        self.banks: dict[str, dict[str, dict[str, np.ndarray]]] = {}
        self.kept_uploads: list[str] = []  # tensors of which the inference rule needs every client's own
        self.nonnegative: list[str] = []  # tensors that count or are variances
        self.finished_rounds = 0
        self.saved_round = -1  # newest round from which the run could be resumed
        self.log = RoundLog(0)
        self._global: dict[str, np.ndarray] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}  # of the tensors that come back
        self._sent: list[tuple[str, Message]] = []
        self._phase = "train"

    @property
    def clients(self) -> list[str]:
        """Source clients in domain order."""
        return list(self.sites)

    def join(self, roster: Roster) -> None:
        """Wait for the sites (`run.wait_for_sites`); ClientFailedError names those without which there is no run."""
        roster.gather(self.experiment.run)
        self.roster, self.sites = roster, roster.sites
        self.target_site = TargetSite(self, roster) if roster.target else None

    def summary(self) -> None:
        """Nothing: the records say it."""

    def before_rounds(self, grid: Grid, arrays: ArrayRecord) -> ArrayRecord:
        """Phase 0: the banks, then the step part's prelude (CSAC's acquisition); returns the arrays of round 0."""
        self.log = RoundLog(0)
        for bank in [bank for bank in self.recipe.banks if bank.when == "once"]:
            self._collect(bank, grid)
        if not self.recipe.client.prelude:
            return arrays
        self._phase = self.recipe.client.prelude
        replies = grid.send_and_receive(
            self._train_messages(0, arrays, self.clients), timeout=self.experiment.run.timeout
        )
        arrays = self._aggregate(replies)
        self._phase = "train"
        return arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """One message per drawn client: shared tensors, bank records, config."""
        round = self.finished_rounds + 1
        self.log = RoundLog(round)
        return self._train_messages(round, arrays, self._draw(round))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord | None]:
        """Validate, weigh and fuse the replies; the global model of the round."""
        return self._aggregate(replies), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Every source client validates the aggregated model, its batch-norm averages included."""
        known = [name for name, place in self.places.items() if place in ("shared", "upload")]
        record = arrays if len(known) == len(arrays) else ArrayRecord({name: arrays[name] for name in known})
        messages = self._messages("evaluate", self.log.round, record, self.clients, {})
        return messages + (self.target_site.messages(self.log.round, arrays) if self.target_site else [])

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Unweighted mean over the clients (selection never sees the target; core.md R7)."""
        if self.target_site:
            replies = self.target_site.take(replies)
        for client, columns in self._judge(check_validation, replies, "validation refused").items():
            self.log.row(client).update(columns)
        return None

    # --- messages -----------------------------------------------------------------------------------------------

    def _draw(self, round: int) -> list[str]:
        count = self.experiment.train.clients_per_round
        if count == 0 or count >= len(self.clients):
            return self.clients
        drawn = numpy_rng(self.experiment.run.seed, "clients", round).choice(len(self.clients), count, replace=False)
        return [self.clients[index] for index in sorted(drawn)]

    def _train_messages(self, round: int, arrays: ArrayRecord, clients: Sequence[str]) -> list[Message]:
        self._global = record_to_arrays(arrays)
        returned = ("shared", "upload")
        self._shapes = manifest({name: array for name, array in self._global.items() if self.places[name] in returned})
        shared = [name for name, place in self.places.items() if place == "shared"]
        down = arrays if len(shared) == len(arrays) else ArrayRecord({name: arrays[name] for name in shared})
        banks: dict[str, dict[str, ArrayRecord]] = {}
        for bank in self.recipe.banks:
            entries, kept = self.banks.get(bank.name, {}), self._handed(bank) if bank.when == "once" else []
            wanting = [client for client in clients if client not in kept]
            banks[bank.name] = {client: state_to_record(bank.hand_out(entries, client)) for client in wanting}
        if self.recipe.share.mirrors:
            averages = {name: arrays[name] for name, place in self.places.items() if place == "upload"}
            banks[MIRROR] = dict.fromkeys(clients, ArrayRecord(averages))
        return self._messages(self._phase, round, down, clients, banks)

    def _handed(self, bank: Bank) -> list[str]:
        """Clients that keep a bank which is handed out once; part of the checkpoint."""
        return self.part_states["banks"].setdefault(bank.name, [])

    def _messages(
        self,
        phase: str,
        round: int,
        arrays: ArrayRecord | None,
        clients: Sequence[str],
        banks: Mapping[str, Mapping[str, ArrayRecord]],
        **more: str,
    ) -> list[Message]:
        if self.roster is not None:  # sites may come and go between two phases
            self.roster.gather(self.experiment.run, clients)
        self._sent = []
        kind = {"evaluate": "evaluate", "collect": "query.collect"}.get(phase, "train")
        for client in clients:
            if self.roster is not None and self.roster.missing([client]):
                self._failed(client, NOT_ONLINE)
                continue
            records = {} if arrays is None else {"arrays": arrays}
            records |= {name: handed[client] for name, handed in banks.items() if client in handed}
            config = {**self.run_config, "round": round, "phase": phase, "client": client, **more}
            config |= {"state-round": self.part_states["stored"].get(client, -1), "saved-round": self.saved_round}
            self.log.count(client, "down", records, records)
            message = Message(RecordDict({**records, "config": ConfigRecord(config)}), self.sites[client].node_id, kind)
            self._sent.append((client, message))
        return [message for _, message in self._sent]

    # --- replies ------------------------------------------------------------------------------------------------

    def _judge(
        self,
        check: Callable[[RecordDict, Expected], T],
        replies: Iterable[Message],
        refusal: str,
        banks: tuple[Bank, ...] = (),
    ) -> dict[str, T]:
        """What the check makes of the replies, by client in domain order; what is missing or refused is a failure."""
        found, strays = match(self._sent, replies)
        for line in strays:
            self.log.note(line)
        results = {}
        for client, message in self._sent:
            reply = found.get(client)
            if reply is None:
                self._failed(client, f"no reply within {self.experiment.run.timeout:g} s")
            elif reply.has_error():
                self._failed(client, failure_reason(reply), str(reply.error.reason))
            else:
                self.log.count(client, "up", reply.content.array_records, {"arrays", *(bank.name for bank in banks)})
                try:
                    results[client] = judged(check, reply.content, self._expected(client, message, banks))
                except RejectedReplyError as error:
                    self._failed(client, f"{refusal}: {error}")
        return results

    def _failed(self, client: str, reason: str, traceback: str = "") -> None:
        """Record a failure; with `on_client_failure = "stop"` it ends the run with the client's own traceback."""
        self.log.fail(client, reason)
        for handed in self.part_states["banks"].values():  # it may come back without what it kept
            if client in handed:
                handed.remove(client)
        if self.experiment.run.on_client_failure == "continue":
            return
        raise client_failure(client, self.log.round, reason, traceback)

    def _expected(self, client: str, message: Message, banks: tuple[Bank, ...]) -> Expected:
        config = message.content.config_records["config"]
        return Expected(
            client=client,
            token=self.run_config["token"],
            round=config["round"],
            phase=config["phase"],
            examples=self.sites[client].examples,
            shapes=self._shapes,
            nonnegative=self.nonnegative,
            banks=banks,
            metrics=self.recipe.weights.needs if config["phase"] == "train" else (),
        )

    def _aggregate(self, replies: Iterable[Message]) -> ArrayRecord:
        started = time.perf_counter()
        updates = list(self._judge(check_update, replies, "reply refused", self._round_banks()).values())
        for update in updates:
            self.log.row(update.client).update(examples=update.examples, **update.metrics)
            if update.stored:
                self.part_states["stored"][update.client] = self.log.round
        if not updates:  # core.md R1: the round counts for schedules, everything stays as it was
            self.log.note("no client delivered; the model stays as it was")
        fused = self._fuse(updates) if updates else {}
        self._merge_banks(updates)
        for update in updates if self.kept_uploads else []:
            own = {name: np.array(update.arrays[name]) for name in self.kept_uploads}
            self.banks.setdefault("uploads", {})[update.client] = own
        self.log.aggregation_seconds += time.perf_counter() - started
        return state_to_record({**self._global, **fused})

    def _fuse(self, updates: list[Update]) -> dict[str, np.ndarray]:
        """Weights, then fusion; a non-finite result leaves the global model as it was (core.md R2)."""
        round, rounds = self.log.round, self.experiment.train.rounds
        servers = {
            part: ServerRound(round, rounds, self.clients, self._global, self.part_states[part])
            for part in ("weights", "fuse")
        }
        weights = self.recipe.weights.weigh(updates, servers["weights"])
        fused = self.recipe.fuse.fuse(updates, weights, servers["fuse"])
        for client, weight in weights.items():
            self.log.row(client)["weight"] = float(weight)
        for server in servers.values():
            self.log.details += server.details
            for client, columns in server.client_columns.items():
                self.log.row(client).update(columns)
        broken = [name for name, array in fused.items() if not all_finite(array)]
        if not broken:
            return fused
        reason = f"the aggregate of {broken[0]!r} is not finite"
        if self.experiment.run.on_client_failure == "stop":
            raise ClientFailedError(f"round {self.log.round}: {reason}")
        self.log.note(f"{reason}; the model stays as it was")
        return {}

    def _round_banks(self) -> tuple[Bank, ...]:
        """Banks whose contributions come with this phase's replies."""
        return tuple(bank for bank in self.recipe.banks if bank.when == "round" and self._phase == "train")

    def _merge_banks(self, updates: Sequence[Update]) -> None:
        """Merge the round's contributions; who delivered keeps what was handed out once."""
        for bank in self._round_banks():
            entries = {update.client: owned(update.records[bank.name]) for update in updates}
            self.banks[bank.name] = bank.merge(self.banks.get(bank.name, {}), entries)
        for bank in [bank for bank in self.recipe.banks if bank.when == "once"]:
            handed = self._handed(bank)
            handed += [update.client for update in updates if update.client not in handed]

    def _collect(self, bank: Bank, grid: Grid) -> None:
        """Ask every client for its contribution to a bank, once."""
        messages = self._messages("collect", 0, None, self.clients, {}, bank=bank.name)
        replies = grid.send_and_receive(messages, timeout=self.experiment.run.timeout)
        collected = self._judge(check_collected, replies, f"{bank.name} refused", (bank,))
        entries = {client: owned(arrays) for client, arrays in collected.items()}
        for client, reason in odd_shapes(entries).items():
            self._failed(client, f"{bank.name} refused: {reason}")
            del entries[client]
        self.banks[bank.name] = entries
