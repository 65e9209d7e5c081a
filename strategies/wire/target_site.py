"""The site that holds the unseen domain: it evaluates the global model every round, and never trains."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, MetricRecordValues, RecordDict
from flwr.serverapp import Grid

from fedsim.common.tasks import BY_METRIC
from fedsim.tensors.arrays import state_to_record
from fedsim.tensors.records import Config, config_of
from strategies.parts import Entries
from strategies.wire.exchange import Exchange
from strategies.wire.handshake import NOT_ONLINE, Roster
from strategies.wire.reply_checks import (
    Expected,
    RejectedReplyError,
    check_echo,
    check_examples,
    check_names,
    check_ranges,
    check_records,
    read_metrics,
)
from strategies.wire.round_notes import payloads
from strategies.wire.sites import Site

UPLOADS = "uploads:"  # prefix of the records with single clients' tensors, for inference rules that need them
PHASE = "target"
MOST_ROWS = 10_000  # of details
MOST_LETTERS = 300  # of a name in them
Detail = tuple[str, str, float]  # quantity, layer (or structure), value: a row for details.csv


@dataclass(frozen=True)
class DetailForm:
    """The details that a site may send: the quantities of the inference rule and of the task, and what they are of.

    names: the layers of the network, and the names of structures
    """

    quantities: Collection[str] = ()
    names: Collection[str] = ()


@dataclass(frozen=True)
class TargetScore:
    """Primary metric (e.g. accuracy, a fraction) and loss on the unseen domain; None when its site did not reply.

    An undefined metric is NaN.

    seconds: the time of the evaluation on the server (0 when a site did it; the site's row has its time)
    details: (quantity, layer, value) of the inference rule, for details.csv
    predictions: those of the server's own evaluation (fedsim.records.predictions); those of a site never leave it
    """

    value: float | None = None
    loss: float | None = None
    seconds: float = 0.0
    details: list[Detail] = field(default_factory=list)
    predictions: Any = None


class Asked(Protocol):
    """Whoever evaluates the unseen domain at the same time as the clients validate."""

    def messages(self, round: int, arrays: ArrayRecord, entries: Entries) -> list[Message]:
        """What to ask of the model, with the bank entries that the inference rule wants."""

    def others(self, replies: Iterable[Message]) -> Iterator[Message]:
        """The replies that are not for this object."""

    def take(self, used: bool = True) -> None:
        """All replies are there; `used` says whether the model is kept."""

    def score(self, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """The score of the model of this round, after all replies are there."""

    def ask(self, grid: Grid, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """The score of the initial model, which no client validates."""


class TargetSite:
    """The exchange with the unseen domain's site: one message per round, and its reply is checked like a client's."""

    def __init__(self, exchange: Exchange, roster: Roster, form: DetailForm | None = None) -> None:
        self.exchange = exchange
        self.roster = roster
        self.form = form or DetailForm()
        self._score = TargetScore()
        self._sent: Message | None = None
        self._round = 0
        self._reply: Message | None = None  # the site's first one of this round

    @property
    def site(self) -> Site:
        """The site's present node; after a restart it may be another one."""
        assert self.roster.target is not None  # there is no TargetSite without one
        return self.roster.target

    def messages(self, round: int, arrays: ArrayRecord, entries: Entries) -> list[Message]:
        """The global model, with the bank entries that the inference rule wants; no message to a missing site."""
        exchange = self.exchange
        client = self.site.client
        self._score = TargetScore()
        self._sent = None
        self._reply = None
        self._round = round
        if self.roster.missing([client]):
            exchange.fail(client, NOT_ONLINE)
            return []
        records = {"arrays": arrays}
        for name in sorted(entries):
            records[f"{UPLOADS}{name}"] = state_to_record(entries[name])
        exchange.notes.count(client, "down", payloads(records), {"arrays"})
        config: Config = {**exchange.run_config, "round": round, "phase": PHASE, "client": client}
        content = RecordDict({**records, "config": ConfigRecord(config)})
        self._sent = Message(content, self.site.node_id, "query.target")
        return [self._sent]

    def others(self, replies: Iterable[Message]) -> Iterator[Message]:
        """The replies that do not answer our message; the reply that does is kept for `take`."""
        asked = self._sent.metadata if self._sent else None
        for reply in replies:
            if asked is None or reply.metadata.reply_to_message_id != asked.message_id:
                yield reply
                continue
            is_of_site = reply.has_error() or reply.metadata.src_node_id == asked.dst_node_id
            if self._reply is None and is_of_site:
                self._reply = reply

    def take(self, used: bool = True) -> None:
        """Keep the score of our message's reply, unless its model is not used. A failure is handled as
        `run.on_client_failure`."""
        if self._sent is not None and (used or self._reply is None):
            exchange = self.exchange
            site = self.site
            expected = Expected(
                client=site.client,
                token=exchange.token,
                round=self._round,
                phase=PHASE,
                examples=site.examples,
                metric=exchange.metric,
                data=site.content,
            )
            check = partial(read_score, self.form)
            answer = exchange.check_one(self._reply, check, expected, "evaluation refused")
            if answer is not None:
                self._score, seconds = answer
                row = exchange.notes.row(site.client)
                row["evaluation_seconds"] = seconds
        self._sent = None

    def score(self, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """The score that came for the model of this round."""
        return self._score

    def ask(self, grid: Grid, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """The score of the initial model, which has a phase of its own; no client has entries yet."""
        timeout = self.exchange.experiment.run.timeout
        messages = self.messages(0, arrays, {})
        replies = grid.send_and_receive(messages, timeout=timeout)
        for _ in self.others(replies):
            pass  # a stray reply
        self.take()
        return self._score


def score_records(score: TargetScore, examples: int, metric: str) -> RecordDict:
    """A site's reply without its echo; metric: the primary metric of the task."""
    assert score.value is not None  # the site has evaluated
    assert score.loss is not None
    metrics: dict[str, MetricRecordValues] = {"num-examples": examples}
    if not math.isnan(score.value):  # an undefined metric is left out
        metrics[metric] = score.value
    metrics["loss"] = score.loss
    metrics["evaluation_seconds"] = score.seconds
    details: Config = {
        "quantities": [quantity for quantity, _, _ in score.details],
        "names": [name for _, name, _ in score.details],
        "values": [float(value) for _, _, value in score.details],
    }
    return RecordDict({"metrics": MetricRecord(metrics), "details": ConfigRecord(details)})


def read_score(form: DetailForm, content: RecordDict, expected: Expected) -> tuple[TargetScore, float]:
    """The score in a reply, and the seconds that the site took; RejectedReplyError says what is wrong.

    form: the details that it may have
    """
    check_records(content, set(), {"metrics"}, {"echo", "details"})
    check_echo(content, expected)
    metrics = read_metrics(content)
    check_examples(metrics, expected.examples)
    metric = expected.metric
    needed = ["evaluation_seconds", "loss"]
    if not BY_METRIC[metric].can_be_undefined:
        needed = sorted([metric, *needed])
    check_names("metrics", sorted(metrics), needed, {metric})
    check_ranges(metrics)
    details = _detail_rows(config_of(content, "details"))
    check_form(details, form)
    value = metrics.get(metric, math.nan)
    score = TargetScore(value, metrics["loss"], details=details)
    return score, metrics["evaluation_seconds"]


def check_form(rows: Sequence[Detail], form: DetailForm) -> None:
    """Raises RejectedReplyError for a detail that was not asked for, and for one that is there twice."""
    seen: set[tuple[str, str]] = set()
    for quantity, name, _ in rows:
        detail = f"the record 'details' has {quantity!r} of {name!r}"
        if quantity not in form.quantities or name not in form.names:
            raise RejectedReplyError(f"{detail}, and nobody asked for it")
        if (quantity, name) in seen:
            raise RejectedReplyError(f"{detail} twice")
        seen.add((quantity, name))


def _detail_rows(details: ConfigRecord) -> list[Detail]:
    """The rows for details.csv: printable names and finite values, as `score_records` writes them."""
    columns = [details.get(name) for name in ("quantities", "names", "values")]
    lists = [column for column in columns if isinstance(column, list)]
    if len(details) != 3 or len(lists) != 3:
        raise RejectedReplyError("the record 'details' does not consist of three lists")
    if any(len(column) > MOST_ROWS for column in lists):
        raise RejectedReplyError(f"the record 'details' has more than {MOST_ROWS} rows")
    rows = list(zip(*lists, strict=True))
    for quantity, name, value in rows:
        if not is_name(quantity) or not is_name(name):
            raise RejectedReplyError("the record 'details' has a name that is not one printable line")
        if not isinstance(value, float) or not np.isfinite(value):
            raise RejectedReplyError("the record 'details' has a value that is not a finite number")
    return rows


def is_name(name: object) -> bool:
    """Whether this is one printable line of at most MOST_LETTERS letters."""
    return isinstance(name, str) and name.isprintable() and len(name) <= MOST_LETTERS
