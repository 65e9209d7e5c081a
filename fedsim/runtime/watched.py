"""The inline runtime for tests: it keeps every message and its reply, and can change replies on purpose."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from flwr.app import Error, Message

from fedsim.apps.client import app
from fedsim.runs.plan import Plan
from fedsim.runs.processes import reason_against
from fedsim.runtime.forked import ForkedGrid
from fedsim.runtime.local_grid import InlineGrid
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.records import arrays_of, config_of, metrics_of

Tamper = Callable[[Message, Message], Message]


class WatchedGrid(InlineGrid):
    """Inline grid that keeps every message and its reply in `seen`, and may replace replies."""

    def __init__(self, nodes: int, tamper: Tamper | None = None) -> None:
        super().__init__(app, nodes)
        self.tamper = tamper
        self.seen: list[tuple[Message, Message]] = []

    def deliver(self, messages: list[Message]) -> Iterable[Message]:
        """Deliver the messages; keep and perhaps replace the replies."""
        for message, reply in zip(messages, super().deliver(messages), strict=True):
            final = self.tamper(message, reply) if self.tamper else reply
            self.seen.append((message, final))
            yield final


class LonelyGrid(ForkedGrid):
    """Every client has a process of its own, and the messages of a round go out in reverse order; keeps `seen`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(app, plan, len(plan.clients))
        self.seen: list[tuple[Message, Message]] = []

    def deliver(self, messages: list[Message]) -> Iterable[Message]:
        """The replies in the order of the messages."""
        found = {reply.metadata.reply_to_message_id: reply for reply in super().deliver(messages[::-1])}
        self.seen += [(message, found[message.metadata.message_id]) for message in messages]
        return [reply for _, reply in self.seen[len(self.seen) - len(messages) :]]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Deliver all messages of a round at once."""
        yield from self.deliver(list(self._stamped(messages)))

    def _hand_out(self, made: list[Message]) -> None:
        """Each process serves one client, also while others have nothing to do."""
        for message in made:
            self._processes[self.node_ids.index(message.metadata.dst_node_id)].give(message)
        made.clear()


def lonely_grid(plan: Plan) -> LonelyGrid:
    """The grid for a plan; where processes cannot be forked, the clients of this process are in reverse order only."""
    alone = 1 if reason_against(plan.experiment) else len(plan.clients)
    return LonelyGrid(replace(plan, experiment=plan.experiment.replace(run={"processes": alone})))


def replies(seen: Sequence[tuple[Message, Message]]) -> dict[str, dict[str, object]]:
    """{"train of rot0 in round 1": {name: number or tensor}} of all messages about training, without times."""
    found = {}
    for message, reply in seen:
        config = config_of(message.content)
        if message.metadata.message_type == "train" and not reply.has_error():
            content: dict[str, object] = {
                f"{record} {name}": array.data
                for record, own in arrays_of(reply.content).items()
                for name, array in own.items()
            }
            metrics = {name: value for own in metrics_of(reply.content).values() for name, value in own.items()}
            numbers = {name: value for name, value in metrics.items() if "seconds" not in name}
            phase, client, round = (str(config[key]) for key in ("phase", "client", "round"))
            found[f"{phase} of {client} in round {round}"] = content | numbers
    return found


def trouble(banks: set[str], round: int) -> Tamper:
    """A function that damages replies: one contribution to every bank gets one more dimension, and one client fails."""
    done: set[str | int] = set()

    def tamper(message: Message, reply: Message) -> Message:
        if reply.has_error():
            return reply
        config = config_of(message.content)
        for bank in (banks - done) & set(arrays_of(reply.content)):
            done.add(bank)
            arrays = record_to_arrays(arrays_of(reply.content)[bank])
            reply.content[bank] = state_to_record({name: array[None] for name, array in arrays.items()})
            return reply
        if config["round"] == round and config["phase"] == "train" and round not in done:
            done.add(round)
            return Message(Error(2, "it fails on purpose, for this check"), reply_to=message)
        return reply

    return tamper
