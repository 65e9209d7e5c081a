"""Protects the global model from harmful replies, in addition to the checks of each single reply.

`too_large` compares the updates of a round with each other (update_limit.py). `unusable` checks the fused model before
it is sent, and `useless` checks what the sites report about it afterwards (fused_check.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from flwr.app import RecordDict

from fedsim.tensors.records import metrics_of
from strategies.parts import Arrays, Update
from strategies.state import ServerState
from strategies.wire.fused_check import Probe, finite_loss, largest, not_finite, suspect
from strategies.wire.reply_checks import Expected
from strategies.wire.update_limit import model_norm, over_limit, remember

STATE = "guard"  # key of the guard's own numbers in the server's state
LARGE = 1e4  # below this, sums and products of a network stay far from the largest float32
STANDS_OUT = 3.0  # an update is named when it is this many times as large as the others'

T = TypeVar("T")


class Guard:
    """Prevents one reply from destroying the model; `limit` is run.update_limit (0: no limit)."""

    def __init__(self, limit: float, probe: Probe | None = None) -> None:
        self.limit, self.probe = limit, probe
        self.sizes: dict[str, float] = {}  # of this round's updates
        self._useless = 0  # sites whose validation loss is not finite

    def too_large(self, sizes: Mapping[str, float], previous: Arrays, state: ServerState) -> dict[str, str]:
        """Clients whose update (of that size) is too large, with the reason."""
        history, _ = state.of_part(STATE)
        self.sizes = dict(sizes)
        norm = model_norm(previous) if self.limit and len(sizes) == 1 else 0.0  # only a single size is compared with it
        return over_limit(sizes, history, norm, self.limit)

    def accept(self, updates: Sequence[Update], state: ServerState) -> None:
        """Remembers the sizes of the updates that made the model of the round."""
        history, _ = state.of_part(STATE)
        for update in updates:
            if update.client in self.sizes:
                remember(history, update.client, self.sizes[update.client])

    def unusable(self, fused: Arrays, previous: Arrays) -> str:
        """The reason why a fused model must not be sent; empty when it may be sent."""
        if broken := not_finite(fused):
            return f"the aggregate of {broken!r} is not finite"
        if self.probe is None or not largest(fused) > LARGE:
            return ""
        sound = self.probe({**previous, **fused}) or not self.probe(previous)
        return "" if sound else "the outputs of the aggregated model are not finite"

    def too_far(self, move: float, updates: Sequence[Update]) -> str:
        """The reason why a fused model that moved that far must not be used; empty when it may be used."""
        largest_update = max((self.sizes.get(update.client, 0.0) for update in updates), default=0.0)
        if not self.limit or not largest_update or move <= self.limit * largest_update:
            return ""
        times = f"{move / largest_update:.3g} times as far as the largest update"
        return f"the aggregated model moves {times}; run.update_limit is {self.limit:g}"

    def culprit(self, updates: Sequence[Update], usable: Callable[[list[Update]], bool]) -> str:
        """The client without which the model is usable, the largest update first; empty when there is none."""
        for update in sorted(updates, key=lambda update: -self.sizes.get(update.client, 0.0)):
            rest = [other for other in updates if other is not update]
            if rest and usable(rest):
                return update.client
        return ""

    def heard(self, check: Callable[[RecordDict, Expected], T]) -> Callable[[RecordDict, Expected], T]:
        """The check of a validation, which also counts who cannot use the model; `useless` can then be asked."""
        self._useless = 0

        def counted(content: RecordDict, expected: Expected) -> T:
            self._useless += not finite_loss(metrics_of(content))
            return check(content, expected)

        return counted

    def useless(self, asked: int) -> tuple[str, str]:
        """(client, reason) when most of the sites asked cannot use the model; two empty strings when they can.

        The client is the one whose update is much larger than the others'; empty when there is none.
        """
        count = self._useless
        if 2 * count <= asked:
            return "", ""
        client, times = suspect(self.sizes)  # a refused one is not part of the model, and ends the run with "stop"
        reason = f"the model's loss is not finite at {count} of {asked} sites"
        if client and times >= STANDS_OUT:
            return client, f"{reason}; its update has {times:.3g} times the norm of the others'"
        return "", f"{reason}, and no update stands out (the largest is that of {client!r})" if client else reason

    @staticmethod
    def put_back(record: Mapping, previous: Mapping) -> None:
        """Replaces the tensors of a record in place, because Flower's loop and the checkpoint hold this record."""
        record.__dict__["_data"].update(previous)
