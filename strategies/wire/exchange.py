"""Builds the messages to the clients, and decides which of their replies are used."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedsim.arrays import state_to_record
from fedsim.experiment import Experiment
from fedsim.tasks import CLASSIFICATION
from strategies.server_round import Entries
from strategies.state import ServerState
from strategies.wire.handshake import NOT_ONLINE, Roster
from strategies.wire.matching import match
from strategies.wire.reply_checks import Expected, RejectedReplyError, client_failure, failure_reason, judged
from strategies.wire.round_log import RoundLog
from strategies.wire.sites import Site

T = TypeVar("T")


class Exchange:
    """Builds the messages of a phase and checks the replies. A failure is recorded, or it ends the run.

    `sites` maps client names to Flower nodes (from the handshake). `log` is the record of the round. `saved_round` is
    the newest round from which the run could be resumed. `metric` is the task's primary metric in evaluation replies.
    """

    def __init__(
        self,
        experiment: Experiment,
        run_config: dict[str, str],
        state: ServerState,
        metric: str = CLASSIFICATION.metric,
    ) -> None:
        self.metric = metric
        self.experiment, self.run_config, self.state = experiment, run_config, state
        self.sites: dict[str, Site] = {}
        self.roster: Roster | None = None
        self.log = RoundLog(0)
        self.saved_round = -1
        self._sent: list[tuple[str, Message]] = []

    @property
    def clients(self) -> list[str]:
        """The source clients, in the order of the domains."""
        return list(self.sites)

    def join(self, roster: Roster) -> None:
        """Waits for the sites (`run.wait_for_sites`); ClientFailedError names the missing sites that the run needs."""
        roster.gather(self.experiment.run)
        self.roster, self.sites = roster, roster.sites

    def messages(
        self,
        phase: str,
        round: int,
        arrays: ArrayRecord | None,
        clients: Sequence[str],
        banks: Mapping[str, Mapping[str, ArrayRecord]],
        own: Mapping[str, ArrayRecord] | None = None,
        **more: Any,
    ) -> list[Message]:
        """One message per client that is online: tensors, its records of the banks ({bank: {client: record}}), config.

        own: tensors of a client's own, in place of `arrays`. A client that is not online has failed.
        """
        if self.roster is not None and clients:  # sites may come and go between two phases
            self.roster.gather(self.experiment.run, clients)
        self._sent = []
        kind = {"evaluate": "evaluate", "collect": "query.collect"}.get(phase, "train")
        for client in clients:
            if self.roster is not None and self.roster.missing([client]):
                self.fail(client, NOT_ONLINE)
                continue
            records = {} if arrays is None else {"arrays": (own or {}).get(client, arrays)}
            records |= {name: handed[client] for name, handed in banks.items() if client in handed}
            config = {**self.run_config, "round": round, "phase": phase, "client": client, **more}
            config["counts"] = [site.examples for site in self.sites.values() if site.examples]
            config |= {"state-round": self.state.stored.get(client, -1), "saved-round": self.saved_round}
            self.log.count(client, "down", records, records)
            message = Message(RecordDict({**records, "config": ConfigRecord(config)}), self.sites[client].node_id, kind)
            self._sent.append((client, message))
        return [message for _, message in self._sent]

    @property
    def asked(self) -> int:
        """The number of clients that were asked in this phase."""
        return len(self._sent)

    def client_of(self, message: Message) -> str:
        """The name of the client that a message of this phase is for; empty for another message."""
        return next((client for client, sent in self._sent if sent is message), "")

    def again(self, message: Message) -> Message:
        """The same message for the node that its client has now; its reply replaces that of the first message."""
        client = self.client_of(message)
        renewed = Message(message.content, self.sites[client].node_id, message.metadata.message_type)
        self._sent = [(name, renewed if sent is message else sent) for name, sent in self._sent]
        return renewed

    def judge(
        self,
        check: Callable[[RecordDict, Expected], T],
        replies: Iterable[Message],
        refusal: str,
        own: Mapping[str, Mapping[str, Any]] | None = None,
        **expected: Any,
    ) -> dict[str, T]:
        """The results of the check for each reply, by client, in the order of the domains. A missing or refused reply
        is a failure.

        `expected` are fields of `Expected` in addition to those that the message itself gives, and `own` those of
        single clients.
        """
        found, strays = match(self._sent, replies)
        for line in strays:
            self.log.note(line)
        known = {"arrays", *(bank.name for bank in expected.get("banks", ()))}
        results = {}
        for client, message in self._sent:
            reply = found.get(client)
            if reply is None:
                self.fail(client, f"no reply within {self.experiment.run.timeout:g} s")
            elif reply.has_error():
                self.fail(client, failure_reason(reply), str(reply.error.reason))
            else:
                self.log.count(client, "up", reply.content.array_records, known)
                try:
                    results[client] = judged(
                        check,
                        reply.content,
                        self._expected(client, message, {**expected, **(own or {}).get(client, {})}),
                    )
                except RejectedReplyError as error:
                    self.fail(client, f"{refusal}: {error}")
        return results

    def fail(self, client: str, reason: str, traceback: str = "") -> None:
        """Records a failure. With `on_client_failure = "stop"` it ends the run with the client's own traceback."""
        self.log.fail(client, reason)
        for handed in self.state.handed.values():  # when it comes back, it may have lost its state
            if client in handed:
                handed.remove(client)
        if self.experiment.run.on_client_failure == "continue":
            return
        raise client_failure(client, self.log.round, reason, traceback)

    def _expected(self, client: str, message: Message, more: Mapping[str, Any]) -> Expected:
        config = message.content.config_records["config"]
        return Expected(
            client=client,
            token=self.run_config["token"],
            round=config["round"],
            phase=config["phase"],
            examples=self.sites[client].examples,
            metric=self.metric,
            **more,
        )


def encoded(handed: Mapping[str, Entries]) -> dict[str, dict[str, ArrayRecord]]:
    """What each bank sends to each client, as records. A record that several clients receive is encoded once."""
    written: dict[int, ArrayRecord] = {}
    records: dict[str, dict[str, ArrayRecord]] = {}
    for bank, owners in handed.items():
        for client, arrays in owners.items():
            if id(arrays) not in written:
                written[id(arrays)] = state_to_record(arrays)
            records.setdefault(bank, {})[client] = written[id(arrays)]
    return records
