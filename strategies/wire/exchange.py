"""Builds the messages to the clients, and decides which of their replies are used."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecordValues, Message, RecordDict

from fedsim.common.tasks import CLASSIFICATION
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import state_to_record
from fedsim.tensors.records import Config, arrays_of, config_record, content_of, metrics_of
from strategies.server_round import Arrays
from strategies.state import ServerState
from strategies.wire.handshake import NOT_ONLINE, Roster
from strategies.wire.matching import LOST, Sent
from strategies.wire.reply_checks import (
    LARGEST_METRIC,
    MEASURED,
    Check,
    Expected,
    RejectedReplyError,
    checked,
    client_failure,
    failure_reason,
)
from strategies.wire.round_notes import RoundNotes, payloads
from strategies.wire.sites import Site

KEPT_RECORDS = 8  # of an encoder
KINDS = {"evaluate": "evaluate", "collect": "query.collect", "doubt": "query.doubt"}  # of messages, by phase
CLOCKS = 1.0  # seconds that a client's clock may count more than the server's

T = TypeVar("T")
Failures = dict[str, tuple[str, str]]  # (reason, traceback of the client) by client
RecordsOf = Callable[[str], Mapping[str, ArrayRecord]]  # the records for a client, by its name


class Exchange:
    """Builds the messages of a phase and checks the replies. A failure is recorded, or it ends the run.

    metric: the task's primary metric in the replies to a validation
    experiment, run_config: the run's settings, and what each message carries of them
    state: the server's state, which says in which round a client last stored its own
    token: names the run in every message and reply
    sites: what the handshake said of each client, by name
    roster: which sites are online; None where all clients always are
    notes: those of the current round
    saved_round: the newest round from which the run could be resumed
    measured: the metrics of every reply to a train message
    validates: whether clients validate
    columns: the further metrics that a reply to a train message may have; None: any
    orders: the images and steps that a round orders of each client, as far as they are known
    """

    def __init__(
        self,
        experiment: Experiment,
        run_config: Config,
        state: ServerState,
        metric: str = CLASSIFICATION.metric,
    ) -> None:
        self.metric = metric
        self.experiment = experiment
        self.run_config = run_config
        self.state = state
        self.token = str(run_config["token"])
        self.sites: dict[str, Site] = {}
        self.roster: Roster | None = None
        self.notes = RoundNotes(0)
        self.saved_round = -1
        self.measured: Collection[str] = MEASURED
        self.validates = True
        self.columns: Collection[str] | None = None
        self.orders: Mapping[str, Mapping[str, float]] = {}
        self._asked_at = time.perf_counter()  # when the messages of this phase began to be sent
        self._sent = Sent()
        self._asked: list[str] = []  # in this phase
        self._phase = ""

    @property
    def clients(self) -> list[str]:
        """The source clients, in the order of the domains."""
        return list(self.sites)

    def join(self, roster: Roster) -> None:
        """Waits for the sites (`run.wait_for_sites`); ClientFailedError names the missing sites that the run needs."""
        roster.gather(self.experiment.run)
        self.roster = roster
        self.sites = roster.sites

    def begin(self, number: int) -> RoundNotes:
        """Begins a round; returns its notes, which are empty."""
        self.notes = RoundNotes(number)
        return self.notes

    def messages(
        self,
        phase: str,
        arrays: ArrayRecord | None,
        clients: Sequence[str],
        records: RecordsOf = lambda client: {},
        **more: ConfigRecordValues,
    ) -> Iterator[Message]:
        """One message per client that is online, made when it is its turn: tensors, further records, config.

        records: a client's records of the banks; `arrays` among them are its own, in place of those of all clients.
        A client that is not online has failed. One that is gone in this round is asked nothing more.
        """
        clients = [client for client in clients if client not in self.notes.gone]
        away: Collection[str] = ()
        if self.roster is not None and clients:  # sites may come and go between two phases
            self.roster.gather(self.experiment.run, clients)
            away = set(self.roster.missing(clients))
        self._sent = Sent()
        self._phase = phase
        self._asked_at = time.perf_counter()
        for client in clients:
            self.notes.row(client)
            if client in away:
                self.fail(client, NOT_ONLINE)
        self._asked = [client for client in clients if client not in away]
        return self._made(arrays, records, more)

    def _made(
        self, arrays: ArrayRecord | None, records: RecordsOf, more: Mapping[str, ConfigRecordValues]
    ) -> Iterator[Message]:
        """The messages of this phase, each made when it is its turn; the arguments are those of `messages`."""
        kind = KINDS.get(self._phase, "train")
        common = self._common_config(more)
        model = {} if arrays is None else {"arrays": arrays}
        sizes = payloads(model)
        # Where processes take one client after the other, the last of them are short.
        largest_first = sorted(self._asked, key=lambda client: -self.sites[client].examples)
        for client in largest_first:
            of_client = records(client)
            names = {*model, *of_client}
            self.notes.count(client, "down", sizes | payloads(of_client), names)
            state_round = self.state.stored.get(client, -1)
            config = config_record({**common, "client": client, "state-round": state_round})
            content = content_of({**model, **of_client, "config": config})
            message = Message(content, self.sites[client].node_id, kind)
            yield self._sent.add(client, message)

    def _common_config(self, more: Mapping[str, ConfigRecordValues]) -> Config:
        """What the config of every message of this phase says."""
        config: Config = {**self.run_config, "round": self.notes.round, "phase": self._phase, **more}
        config["saved-round"] = self.saved_round
        if self.experiment.train.budget != "paper":
            counts = [site.examples for site in self.sites.values()]
            config["counts"] = [count for count in counts if count]
        return config

    @property
    def asked(self) -> int:
        """How many clients were asked in this phase."""
        return len(self._asked)

    def awaited(self, reply: Message) -> str:
        """The client for whose message of this phase this is the first reply; empty for any other reply."""
        return self._sent.awaited(reply)

    def again(self, client: str) -> Message:
        """A client's message for the node that it has now; its reply replaces that of the first message."""
        message = self._sent.open[client]
        node = self.sites[client].node_id
        renewed = Message(message.content, node, message.metadata.message_type)
        return self._sent.add(client, renewed)

    def check(
        self,
        check: Check[T],
        replies: Iterable[Message],
        refusal: str,
        wanted: Callable[[Expected], Expected] = lambda expected: expected,
        keep: Callable[[T], T] = lambda result: result,
    ) -> tuple[dict[str, T], Failures]:
        """The results of a check of each reply, and the failures (reason, traceback), both by client.

        Replies are checked as they arrive, and only what `keep` makes of a result is kept; it stores, and refuses
        nothing. `wanted` fills in the fields of `Expected` that the message itself does not say.
        """
        results: dict[str, T] = {}
        failures: Failures = {}
        for reply in replies:
            client = self._sent.match(reply)
            if not client:
                continue
            if reply.has_error():
                failures[client] = failure_reason(reply), str(reply.error.reason)
            else:
                expected = wanted(self._expected(client))
                self._measure(reply.content, expected)
                try:
                    results[client] = keep(checked(check, reply.content, expected))
                except RejectedReplyError as error:
                    failures[client] = f"{refusal}: {error}", ""
            del reply  # while the next one is on its way, there is room for one reply
        return results, failures

    def _measure(self, content: RecordDict, expected: Expected) -> None:
        """Counts the bytes of a reply, and bounds the seconds that it reports."""
        names = {"arrays", *(bank.name for bank in expected.banks)}
        sizes = payloads(arrays_of(content))
        self.notes.count(expected.client, "up", sizes, names)
        self.bound_seconds(expected.client, content)

    def bound_seconds(self, client: str, content: RecordDict) -> None:
        """Puts the time since the phase began in the place of every longer time that a reply reports, with a note.

        The time of the reply's work cannot be longer. The reply is not refused: a server whose machine slept has
        waited less than its clients worked.
        """
        waited = time.perf_counter() - self._asked_at
        metrics = metrics_of(content).get("metrics")
        if metrics is None:
            return
        for name, value in list(metrics.items()):
            is_time = str(name).endswith("_seconds")
            if not is_time or not isinstance(value, int | float):
                continue
            if waited + CLOCKS < value <= LARGEST_METRIC:
                metrics[name] = waited
                reported = f"client {client!r}: its {name} is {value:.3g}"
                self.notes.note(f"{reported}, and the server waited {waited:.3g} s, which is recorded")

    def record_failures(self, results: Mapping[str, T], failures: Failures) -> dict[str, T]:
        """The results in domain order, after the failures (a missing reply is one) have been recorded in that order."""
        for line in self._sent.strays:
            self.notes.note(line)
        silence = self._silence(), ""
        in_order: dict[str, T] = {}
        for client in self._asked:
            if client in results:
                in_order[client] = results[client]
            else:
                reason, traceback = failures.get(client, silence)
                self.fail(client, reason, traceback)
        return in_order

    def check_one(self, reply: Message | None, check: Check[T], expected: Expected, refusal: str) -> T | None:
        """The result of the check of a reply that comes alone; None when it is missing or fails, which is recorded."""
        if reply is None:
            self.fail(expected.client, self._silence())
        elif reply.has_error():
            self.fail(expected.client, failure_reason(reply), str(reply.error.reason))
        else:
            self.bound_seconds(expected.client, reply.content)
            try:
                return checked(check, reply.content, expected)
            except RejectedReplyError as error:
                self.fail(expected.client, f"{refusal}: {error}")
        return None

    def _silence(self) -> str:
        return f"no reply within {self.experiment.run.timeout:g} s"

    def record_silent(self, results: Mapping[str, T], failures: Failures) -> None:
        """Records who did not answer. What the others say of a model that was taken back is no failure of theirs."""
        lost = tuple(f"error {code}:" for code in LOST)
        answered: dict[str, Any] = dict(results)
        for client, failure in failures.items():
            reason, _ = failure
            if not reason.startswith(lost):
                answered[client] = failure
        self.record_failures(answered, failures)

    def fail(self, client: str, reason: str, traceback: str = "") -> None:
        """Records a failure. With `on_client_failure = "stop"` it ends the run with the client's own traceback."""
        self._note_failure(client, reason)
        if self.experiment.run.on_client_failure == "continue":
            return
        raise client_failure(client, self.notes.round, reason, traceback)

    def lose(self, client: str) -> None:
        """Records that a client is gone before its reply arrived, as the settings ask for; the run goes on."""
        self.notes.gone.append(client)
        self._note_failure(client, "gone before its reply arrived (train.lost_replies)")

    def _note_failure(self, client: str, reason: str) -> None:
        """Notes why a client's reply does not count. When the client comes back, it may have lost its state."""
        self.notes.fail(client, reason)
        for handed in self.state.handed.values():
            if client in handed:
                handed.remove(client)

    def _expected(self, client: str) -> Expected:
        return Expected(
            client=client,
            token=self.token,
            round=self.notes.round,
            phase=self._phase,
            examples=self.sites[client].examples,
            metrics=self.measured,
            order=self.orders.get(client, {}),
            metric=self.metric,
            select_by=self.experiment.run.select_by,
            tests_sources=bool(self.experiment.data.source_test),
            data=self.sites[client].content,
        )


class Encoder:
    """Encodes tensors as records; the newest records are kept, for tensors that several clients receive."""

    def __init__(self) -> None:
        self._kept: list[tuple[Arrays, ArrayRecord]] = []

    def record(self, arrays: Arrays) -> ArrayRecord:
        """The record of these tensors."""
        for earlier, record in self._kept:
            if earlier is arrays:
                return record
        record = state_to_record(arrays)
        newest = self._kept[1 - KEPT_RECORDS :]
        self._kept = [*newest, (arrays, record)]
        return record
