"""What happens to a reply to a train message when it arrives: it is checked, measured and stored."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from flwr.app import Message

from strategies.banks.checks import layout_of
from strategies.parts import Arrays, Bank, Update
from strategies.server_parts import ServerParts
from strategies.stored import Storage, heads_of
from strategies.wire.cuts import put_back, taken
from strategies.wire.exchange import Exchange
from strategies.wire.guard import Guard
from strategies.wire.reply_checks import Expected, check_update
from strategies.wire.reply_limits import metrics_over_limit, records_over_limit
from strategies.wire.round_notes import RoundNotes
from strategies.wire.update_limit import model_norm, update_size


class Arrivals:
    """Takes the replies of a round. Tensors of the updates may be read until `storage` is cleared."""

    def __init__(self, exchange: Exchange, guard: Guard, parts: ServerParts, storage: Storage) -> None:
        self.exchange, self.guard, self.parts, self.storage = exchange, guard, parts, storage

    def take(self, replies: Iterable[Message], model: Arrays) -> list[Update]:
        """The updates that pass the checks of the wire, of the banks, and of what all clients have in common.

        model: the tensors as the clients send them up.
        """
        parts, fuse = self.parts, self.parts.recipe.fuse
        banks, start = parts.contributed(), parts.start
        self.storage.expect(self.exchange.asked * sum(array.nbytes for array in model.values()))
        sizes: dict[str, float] = {}
        layouts: dict[str, dict[str, str]] = {bank.name: {} for bank in banks}
        norms: dict[str, dict[str, float]] = {bank.name: {} for bank in banks}

        shapes, views, metrics = fuse.form(heads_of(model)), parts.views(banks), parts.needs()
        nonnegative = open_names(parts.model.nonnegative, model) if fuse.masked else parts.model.nonnegative

        def wanted(expected: Expected) -> Expected:
            cut = parts.cut(expected.client)
            own = fuse.form(heads_of(taken(model, cut))) if cut else shapes
            return replace(expected, shapes=own, nonnegative=nonnegative, banks=banks, views=views, metrics=metrics)

        def keep(update: Update) -> Update:
            cut = parts.cut(update.client)
            if cut:
                update.arrays = put_back(update.arrays, cut, start)
            if not fuse.masked:
                sizes[update.client] = update_size(update.arrays, start)
            update.arrays = self.storage.put(update.arrays)
            for bank in banks:
                record = update.records[bank.name]
                layouts[bank.name][update.client] = layout_of(record)
                norms[bank.name][update.client] = model_norm(bank.compared(record))
                update.records[bank.name] = self.storage.put(record)
            return update

        arriving = timed(replies, self.exchange.log)
        found = self.exchange.sift(check_update, arriving, "reply refused", wanted, keep)
        updates = self.exchange.settle(*found)
        self._compare(updates, banks, layouts, norms)
        if not fuse.masked:
            self._limit(updates, {client: sizes[client] for client in updates})
        return list(updates.values())

    def _compare(
        self,
        updates: dict[str, Update],
        banks: Iterable[Bank],
        layouts: Mapping[str, Mapping[str, str]],
        norms: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Takes out the updates with records or metrics that are unlike the others'."""
        parts, settings = self.parts, self.exchange.experiment
        for bank in banks:
            odd = parts.odd(bank, layouts[bank.name])
            own = {client: norms[bank.name][client] for client in updates if client not in odd}
            odd |= records_over_limit(own, parts.start, self.guard.limit)
            self._refuse(updates, {client: f"{bank.name}: {reason}" for client, reason in odd.items()})
        reported = {client: update.metrics for client, update in updates.items()}
        self._refuse(updates, metrics_over_limit(reported, parts.needs(), settings.run, settings.train.momentum))

    def _limit(self, updates: dict[str, Update], sizes: Mapping[str, float]) -> None:
        """Take out the updates that are too large."""
        refused = self.guard.too_large(sizes, self.parts.start, self.parts.state)
        for client, size in sizes.items():
            self.exchange.log.row(client)["update_norm"] = size
        self._refuse(updates, refused)

    def _refuse(self, updates: dict[str, Update], reasons: Mapping[str, str]) -> None:
        for client, reason in reasons.items():
            if updates.pop(client, None):
                self.exchange.fail(client, f"reply refused: {reason}")


def open_names(names: Iterable[str], model: Arrays) -> list[str]:
    """Those of the tensors that no rule masks, which are integers."""
    return [name for name in names if name in model and model[name].dtype.kind != "f"]


def timed(replies: Iterable[Message], log: RoundNotes) -> Iterator[Message]:
    """The replies; what is done with each counts as time of the aggregation, the wait for the next one does not."""
    for reply in replies:
        started = time.perf_counter()
        yield reply
        del reply
        log.aggregation_seconds += time.perf_counter() - started
