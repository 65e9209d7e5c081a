"""Lets the ClientApp of somebody else take part: our messages in Flower's usual form, and its replies in ours.

A ClientApp that was written for Flower's FedAvg gets the records `arrays` and `config` (with `server-round`), and
replies with one ArrayRecord and the metric `num-examples`. What else a method needs of a reply is one name in its
metrics (`MEANINGS`), or one more ArrayRecord with the name of a bank.

A client is known by the text `domain` in a ConfigRecord of its replies, otherwise by the number `partition-id` in any
record, otherwise by the id of its node. It is asked for its name before the first round, when it evaluates the initial
model. An app without a function that evaluates is known by its node, and is never asked to validate.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsim.common.errors import CLIENT_APP_RAISED, USER_ERROR
from fedsim.data.benchmarks import unusable
from fedsim.flower.identity import stamp
from fedsim.tensors.records import Config, arrays_of, config_of, configs_of, metrics_of
from strategies.state import ServerState
from strategies.wire.grids import WrappedGrid
from strategies.wire.reply_checks import ECHOED, RATES, RESERVED, Metrics, one_line
from strategies.wire.target_site import PHASE as TARGET_PHASE

EXAMPLES = "num-examples"
PARTITION = "partition-id"
DOMAIN = "domain"
FEDSIM = "fedsim"  # key of what fedsim's own client says of itself, besides its domain
SCORES = ("eval_acc", "eval_accuracy", "accuracy", "acc")  # names of the accuracy in Flower's own examples
LOSSES = ("eval_loss", "loss")
NO_EVALUATION = "No evaluate function registered"  # in the error of a ClientApp without one
EVALUATED = "evaluate_"  # begins the columns of a client's metrics of an evaluation, under its own names
OF_OTHERS = ("bytes_", "validation_", EVALUATED)  # beginnings of columns that are none of a training
HISTORY = "apps"  # key of the losses of trained models in the server's state
# What a method may need of a reply to a train message, besides the model and the number of examples.
MEANINGS = {
    "train_loss": "the mean loss of the training",
    "received_loss": "the mean loss of the received model on the client's training data",
    "trained_loss": "the mean loss of the trained model on the same data",
    "gap": "received_loss less the trained_loss of the client's round before",
    "steps": "the number of optimizer steps of the round",
    "gradient_count": "by how many gradients the parameters moved; with SGD without momentum it is `steps`",
    "learning_rate": "the learning rate of the round",
}
# What the server makes of other numbers where a reply lacks it.
MADE_OF = {"gap": ("received_loss", "trained_loss"), "gap_valid": ("gap",), "gradient_count": ("steps",)}


class UnfitReplyError(Exception):
    """A reply does not have what this run needs; the text says in one line what."""


def names_for(needs: Collection[str]) -> list[str]:
    """The names that replies must have, in words, for these needs of server parts.

    >>> names_for(["gap", "gap_valid"]), names_for(["gradient_count", "steps"])
    (['gap, or received_loss and trained_loss'], ['steps'])
    """
    names = []
    for name in sorted(needs):
        sources = MADE_OF.get(name, ())
        if not sources:
            names.append(name)
        elif not set(sources) <= set(needs):
            names.append(f"{name}, or {' and '.join(sources)}")
    return names


class AppGrid(WrappedGrid):
    """A grid whose nodes have a ClientApp of somebody else.

    initial: the model with which the clients are asked for their names
    needs: the metrics that server parts need of each reply. banks: the names of the ArrayRecords that they need
    state: the server's state, in which the losses of trained models are kept from round to round
    target: the name of the client that holds the unseen domain; empty: none
    score: the name of the accuracy in the replies to evaluate; empty: the first of `SCORES` that is there
    """

    def __init__(
        self,
        grid: Grid,
        initial: ArrayRecord,
        needs: Collection[str],
        banks: Sequence[str],
        state: ServerState,
        target: str = "",
        score: str = "",
    ) -> None:
        super().__init__(grid)
        self.initial = initial
        self.banks = banks
        self.state = state
        self.needs = sorted(needs, key=lambda name: (name in MADE_OF, name))
        self.target = target
        self.score = score
        self.train_config = ConfigRecord()
        self.evaluate_config = ConfigRecord()
        self.silent: set[int] = set()  # the nodes whose app cannot evaluate
        self.introduced: dict[str, str] = {}  # by client: what fedsim's own clients said of themselves
        self.evaluated: dict[str, dict[str, float]] = {}  # by client: the metrics of its last reply to evaluate
        self._names: dict[int, str] = {}  # of the nodes that have answered
        self._pushed: dict[str, tuple[Message, Message]] = {}  # by message id, until the reply

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sends messages in Flower's form; returns their ids."""
        ours = list(messages)
        sent = [self._outgoing(message) for message in ours]
        ids = list(self._grid.push_messages(sent))
        for key, message, outgoing in zip(ids, ours, sent):
            if key:
                self._pushed[key] = message, outgoing
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """The replies that have arrived, in our form."""
        for reply in self._grid.pull_messages(message_ids):
            pair = self._pushed.pop(reply.metadata.reply_to_message_id, None)
            if pair:
                yield self._incoming(*pair, reply)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Sends messages in Flower's form; their replies in ours, as they come."""
        pairs: list[tuple[Message, Message]] = []

        def outgoing() -> Iterator[Message]:
            for ours in messages:
                sent = self._outgoing(ours)
                pairs.append((ours, sent))
                yield sent

        for reply in self._grid.send_and_receive(outgoing(), timeout=timeout):
            answered = reply.metadata.reply_to_message_id
            for ours, sent in pairs:
                if sent.metadata.message_id == answered:
                    yield self._incoming(ours, sent, reply)
                    break

    def _outgoing(self, message: Message) -> Message:
        """A message as Flower's own strategies send it: tensors, and a config with the number of the round."""
        kind = "evaluate"
        settings = self.evaluate_config
        if message.metadata.message_type == "train":
            kind = "train"
            settings = self.train_config
        number = config_of(message.content)["round"]
        config = ConfigRecord({**settings, "server-round": number})
        records = arrays_of(message.content) or {"arrays": self.initial}
        content = RecordDict({**records, "config": config})
        return Message(content, message.metadata.dst_node_id, kind)

    def _incoming(self, ours: Message, sent: Message, reply: Message) -> Message:
        """The reply to our message that the reply to the sent message stands for."""
        stamp(ours, sent.metadata.message_id)
        asked = config_of(ours.content)
        client = str(asked["client"])
        phase = str(asked["phase"])
        content = RecordDict()
        if reply.has_content():
            content = reply.content
        elif phase == "handshake" and NO_EVALUATION in str(reply.error.reason):
            self.silent.add(ours.metadata.dst_node_id)
        else:
            return reply
        try:
            answer = self._translated(ours, content, client, phase)
        except UnfitReplyError as error:
            return Message(Error(CLIENT_APP_RAISED, f"{USER_ERROR}{error}"), reply_to=ours)
        answer["echo"] = ConfigRecord({key: asked[key] for key in ECHOED})
        if reply.has_content():
            reply.content = answer
            return reply
        return Message(answer, reply_to=ours)

    def _translated(self, ours: Message, content: RecordDict, client: str, phase: str) -> RecordDict:
        """The records of a reply in our form; UnfitReplyError says what it lacks."""
        node = ours.metadata.dst_node_id
        name = name_of(content)
        if phase == "handshake":
            return self._introduced(node, name or f"node-{node}", content)
        first_name = self._names.get(node, name)
        if name and node not in self.silent and name != first_name:
            raise UnfitReplyError(f"its reply calls it {name!r}, and before the first round it was {client!r}; give "
                                  "one name in the replies to evaluate and to train")  # fmt: skip
        if ours.metadata.message_type == "train":
            return self._trained(client, content)
        metrics = numbers_of(content, "evaluate")
        answer = self._validated(metrics)
        if phase == TARGET_PHASE:
            answer["details"] = ConfigRecord({"quantities": [], "names": [], "values": []})
        else:
            self.evaluated[client] = metrics
        return answer

    def _introduced(self, node: int, name: str, content: RecordDict) -> RecordDict:
        """The reply of a node to the handshake, whose name and whose text about itself are kept."""
        self._names[node] = name
        for record in configs_of(content).values():
            if FEDSIM in record:
                self.introduced[name] = str(record[FEDSIM])
        return introduction(name, self.target)

    def _trained(self, client: str, content: RecordDict) -> RecordDict:
        """The reply of a client that has trained."""
        records = arrays_of(content)
        models = [name for name in records if name not in self.banks]
        if len(models) != 1:
            raise UnfitReplyError(f"its reply to train has {len(models)} ArrayRecords with a model ({sorted(models)}), "
                                  "and one is needed, e.g. 'arrays'")  # fmt: skip
        lost = sorted(set(self.banks) - set(records))
        if lost:
            raise UnfitReplyError(f"its reply to train lacks the ArrayRecord {lost[0]!r}, which the method needs")
        numbers = numbers_of(content, "train")
        examples = numbers.pop(EXAMPLES)
        metrics = columns_of(numbers)
        self._complete(client, metrics)
        for name in self.needs:
            if name not in metrics:
                raise UnfitReplyError(f"its reply to train lacks the metric {lacking(name, metrics)}")
        (model,) = models
        answer = RecordDict({"arrays": records[model]})
        for name in self.banks:
            answer[name] = records[name]
        answer["metrics"] = metric_record({EXAMPLES: examples, **metrics})
        return answer

    def _complete(self, client: str, metrics: dict[str, float]) -> None:
        """Fills in the numbers that are needed and follow from others, and keeps the loss of the trained model."""
        losses, _ = self.state.of_part(HISTORY)
        if "gap" in self.needs:
            before = losses.get(client)
            has_losses = {"received_loss", "trained_loss"} <= metrics.keys()
            if "gap" in metrics:
                metrics.setdefault("gap_valid", 1.0)
            elif has_losses:
                metrics["gap_valid"] = float(before is not None)
                metrics["gap"] = 0.0
                if before is not None:
                    metrics["gap"] = metrics["received_loss"] - float(before)
        if math.isfinite(metrics.get("trained_loss", math.nan)):  # else the reply is refused, and no later one for it
            losses[client] = metrics["trained_loss"]
        if "steps" in metrics and "gradient_count" in self.needs:
            metrics.setdefault("gradient_count", metrics["steps"])

    def _validated(self, metrics: Metrics) -> RecordDict:
        """The reply of a client that has validated, or of the unseen domain's, of these numbers in its metrics."""
        scores = (self.score,) if self.score else SCORES
        answer: Config = {EXAMPLES: metrics[EXAMPLES], "evaluation_seconds": 0.0}
        for name, candidates in (("accuracy", scores), ("loss", LOSSES)):
            present = [candidate for candidate in candidates if candidate in metrics]
            if not present:
                raise UnfitReplyError(f"its reply to evaluate has no {name}: {' or '.join(candidates)} is needed in "
                                      "its metrics; fedsim.strategy(..., score='NAME') takes another accuracy, and "
                                      "evaluates=False does without")  # fmt: skip
            answer[name] = metrics[present[0]]
        return RecordDict({"metrics": metric_record(answer)})


def introduction(name: str, target: str) -> RecordDict:
    """What our own client would answer in the handshake: its name, and no number of examples."""
    role = "target" if name == target else "source"
    answer: Config = {"client": name, "role": role, "examples": 0, "class-counts": [], "holds": name}
    return RecordDict({"site": ConfigRecord(answer)})


def name_of(content: RecordDict) -> str:
    """The name that a reply gives its client; empty for none. UnfitReplyError for one that no domain can have."""
    for record in configs_of(content).values():
        if DOMAIN in record:
            name = one_line(str(record[DOMAIN]))
            check_name(name)
            return name
    records: list[Mapping] = [*configs_of(content).values(), *metrics_of(content).values()]
    for numbers in records:
        number = numbers.get(PARTITION)
        if isinstance(number, int):
            return f"client-{number}"
    return ""


def check_name(name: str) -> None:
    """Raises UnfitReplyError when no domain can have the name of a client."""
    domain, _, _ = name.partition("/")
    reason = unusable(domain) if name else "because it is empty"
    if reason:
        raise UnfitReplyError(f"its reply calls it {name!r}, and no domain can be called so, {reason}")


def numbers_of(content: RecordDict, kind: str) -> dict[str, float]:
    """The single numbers of a reply's metrics, with a positive whole number of examples among them.

    UnfitReplyError where two records have different numbers of one name.
    """
    metrics: dict[str, float] = {}
    for record in metrics_of(content).values():
        for name, value in record.items():
            if isinstance(value, int | float):
                first = metrics.get(name)
                if first not in (None, value):
                    raise UnfitReplyError(f"its reply to {kind} has the metric {name!r} in two records, as {first} and "
                                          f"{value}; give one of them another name")  # fmt: skip
                metrics[name] = value
    metrics.pop(PARTITION, None)
    if EXAMPLES not in metrics:
        raise UnfitReplyError(f"its reply to {kind} lacks the metric '{EXAMPLES}', the number of its examples")
    examples = metrics[EXAMPLES]
    if float(examples).is_integer():
        metrics[EXAMPLES] = int(examples)
    return metrics


def columns_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """A reply's numbers by the column of clients.csv; UnfitReplyError where two of them would have the same."""
    columns: dict[str, float] = {}
    names: dict[str, str] = {}
    for name, value in numbers.items():
        place = column(name)
        if place in names:
            raise UnfitReplyError(f"the metrics {names[place]!r} and {name!r} of its reply to train are one column, "
                                  f"{place!r}, of clients.csv; give one of them another name")  # fmt: skip
        names[place] = name
        columns[place] = value
    return columns


def column(name: str) -> str:
    """A metric's name as a column of clients.csv, in which it imitates no column of the server's.

    >>> column("Train-Acc"), column("accuracy"), column("gap"), column("evaluate_f1")
    ('train_acc', 'reported_accuracy', 'gap', 'reported_evaluate_f1')
    """
    letters = re.sub("[^a-z0-9_]", "_", name.lower())
    plain = letters[:50]
    is_reserved = plain in RESERVED | RATES or plain.startswith(OF_OTHERS)
    begins_with_letter = plain[:1].isalpha()
    if is_reserved or not begins_with_letter:
        return f"reported_{plain}"
    return plain


def lacking(name: str, metrics: Collection[str]) -> str:
    """The name of a metric that is missing, with what it means and of what the server could make it.

    metrics: those that the reply has; where it has a part of the sources, the missing one is named
    """
    if name == "gap_valid":
        name = "gap"
    sources = MADE_OF.get(name, ())
    present = [source for source in sources if source in metrics]
    absent = [source for source in sources if source not in metrics]
    if present:
        meaning = MEANINGS[absent[0]]
        return f"{absent[0]!r}, {meaning}; of it and its {present[0]} the server makes {name!r}"
    text = repr(name)
    if sources:
        text += f" (or {' and '.join(sources)}, of which the server makes it)"
    if name in MEANINGS:
        text += f", {MEANINGS[name]}"
    return text


def means_of(rows: Mapping[str, Mapping[str, object]], columns: Collection[str]) -> MetricRecord:
    """The mean over the clients of each of these columns that hold numbers."""
    means: dict[str, float] = {}
    for name in columns:
        values: list[float] = []
        for row in rows.values():
            value = row.get(name)
            if isinstance(value, int | float):
                values.append(float(value))
        if values:
            means[name] = sum(values) / len(values)
    return metric_record(means)


def metric_record(numbers: Mapping) -> MetricRecord:
    """Flower's record of these numbers, by name."""
    return MetricRecord(dict(numbers))
