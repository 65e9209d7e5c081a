"""Decides which replies of a phase are used. Later only what a part refuses, and the new model, are checked.

What one reply must look like stands in strategies/wire/reply_checks.py. Here replies of one phase are held against each
other, in this order; who is refused is that client's failure, and the others go on:

1. every reply by itself, when it arrives
2. contributions to banks: their layouts, then their norms
3. numbers of examples that no handshake named
4. numbers that a part computes with (steps, losses, learning rates)
5. the sizes of the updates

An update's size is the L2 norm of its difference to the model from which it started.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from flwr.app import Message, RecordDict

from strategies.attacks import attack
from strategies.banks.checks import layout_of, owned
from strategies.participation import lost
from strategies.parts import Arrays, Bank, RefusedUpdateError, ServerRound, Update
from strategies.server import Server
from strategies.stored import Head, heads_of
from strategies.wire.compression import decode_update
from strategies.wire.cuts import crop, uncrop
from strategies.wire.exchange import Failures
from strategies.wire.fused_check import is_ruined
from strategies.wire.limits import (
    doubtful_losses,
    lower,
    metrics_over_limit,
    model_norm,
    over_limit,
    records_over_limit,
    update_size,
)
from strategies.wire.reply_checks import (
    Expected,
    RejectedReplyError,
    check_collected,
    check_update,
    check_validation,
    one_line,
    refusing,
    reported_loss,
)
from strategies.wire.round_notes import RoundNotes
from strategies.wire.sites import implausible

HISTORY = "guard"  # the key of the sizes of earlier updates in the server's state
BLAMED = "blamed"  # the key of the clients whose update stood out in a round that was taken back
LOSS = "train_loss"
LOWEST_LOSSES = "lowest losses"  # the key of the lowest loss of each client in its validations
Validations = dict[str, dict[str, float]]  # the columns of clients.csv by client


# --- updates --------------------------------------------------------------------------------------------------------


@dataclass
class UpdateChecks:
    """What a phase of training expects of a reply, and what it measures of each update when it arrives.

    shapes: shape and type of every tensor of a reply
    views: the round as each bank sees it
    needs: the metrics with which a part computes
    sizes, layouts, norms: of the updates, and by bank of the contributions, each by client
    """

    server: Server
    model: Arrays
    banks: tuple[Bank, ...]
    shapes: Mapping[str, Head]
    views: Mapping[str, ServerRound]
    needs: Collection[str]
    sizes: dict[str, float] = field(default_factory=dict)
    layouts: dict[str, dict[str, str]] = field(default_factory=dict)
    norms: dict[str, dict[str, float]] = field(default_factory=dict)

    def expect(self, expected: Expected) -> Expected:
        """Adds what the reply of this client must hold."""
        parts, fuse = self.server.parts, self.server.parts.recipe.fuse
        cut = parts.cut(expected.client)
        shapes = parts.form(heads_of(crop(self.model, cut))) if cut else self.shapes
        nonnegative = parts.model.nonnegative
        if fuse.masked:  # integers are sent openly
            nonnegative = [name for name in nonnegative if name in self.model and self.model[name].dtype.kind != "f"]
        return replace(
            expected,
            shapes=shapes,
            decode=self.decode(expected.client) if parts.compress else None,
            nonnegative=nonnegative,
            banks=self.banks,
            views=self.views,
            metrics={*expected.metrics, *self.needs},
            columns=self.server.exchange.columns,
        )

    def decode(self, client: str) -> Callable[[Arrays], Arrays]:
        """A function that reads the compressed tensors of this client; it refuses what no client could have encoded."""
        parts = self.server.parts

        def decoded(sent: Arrays) -> Arrays:
            start = crop({name: parts.start[name] for name in self.model}, parts.cut(client))
            try:
                assert parts.compress is not None
                return decode_update(parts.compress, sent, start, parts.model.parameters)
            except ValueError as error:
                raise RefusedUpdateError(client, str(error)) from error

        return decoded

    def read(self, content: RecordDict, expected: Expected) -> Update:
        """The update of a reply that passes every check of one reply, measured; raises RejectedReplyError."""
        update = check_update(content, expected)
        client, parts = update.client, self.server.parts
        cut = parts.cut(client)
        if cut:
            update.arrays = uncrop(update.arrays, cut, parts.start)
        norms = {bank.name: model_norm(bank.compared(update.records[bank.name])) for bank in self.banks}
        if not parts.recipe.fuse.masked:
            self.sizes[client] = update_size(update.arrays, parts.start)
        for bank in self.banks:
            self.layouts.setdefault(bank.name, {})[client] = layout_of(update.records[bank.name])
            self.norms.setdefault(bank.name, {})[client] = norms[bank.name]
        return update

    def store(self, update: Update) -> Update:
        """The update with its tensors in the storage."""
        storage = self.server.storage
        update.arrays = storage.put(update.arrays)
        for bank in self.banks:
            update.records[bank.name] = storage.put(update.records[bank.name])
        return update


def accept_updates(server: Server, replies: Iterable[Message], model: Arrays) -> tuple[list[Update], dict[str, float]]:
    """The updates that may change the model, in the order of the domains, and the sizes of all that were compared.

    model: the global tensors of the round before. The tensors of the updates may be read until the storage is cleared.
    """
    exchange = server.exchange
    checks = expect_updates(server, model)
    arriving = timed(replies, exchange.notes)
    results, failures = exchange.check(checks.read, arriving, "reply refused", checks.expect, checks.store)
    updates = exchange.record_failures(results, failures)
    train, seed = server.experiment.train, server.experiment.run.seed
    for client in lost(train, list(updates), seed, exchange.notes.round):
        del updates[client]
        exchange.lose(client)
    for client, lie in attack(server, updates).items():
        checks.sizes[client] = update_size(lie, server.parts.start)
        updates[client].arrays = server.storage.put(lie)
    for bank in checks.banks:
        compare_contributions(server, bank, updates, checks)
    compare_examples(server, updates)
    compare_metrics(server, updates)
    sizes = compare_sizes(server, updates, checks)
    return list(updates.values()), sizes


def expect_updates(server: Server, model: Arrays) -> UpdateChecks:
    """What the replies to a phase of training must hold."""
    parts = server.parts
    sent_up = {name: array for name, array in model.items() if server.places[name] in ("shared", "upload")}
    size = sum(array.nbytes for array in sent_up.values())
    server.storage.expect(server.exchange.asked * size)
    banks = parts.contributed()
    shapes = parts.form(heads_of(sent_up))
    return UpdateChecks(server, sent_up, banks, shapes, parts.views(banks), parts.needs())


def compare_contributions(server: Server, bank: Bank, updates: dict[str, Update], checks: UpdateChecks) -> None:
    """Takes out the updates whose contribution to a bank has another layout than the others', or too large a norm."""
    layouts, norms = checks.layouts.get(bank.name, {}), checks.norms.get(bank.name, {})
    refused = server.parts.odd(bank, layouts)
    compared = {client: norms[client] for client in updates if client not in refused}
    refused |= over_norms(server, compared)
    refuse(server, updates, {client: f"{bank.name}: {reason}" for client, reason in refused.items()})


def compare_examples(server: Server, updates: dict[str, Update]) -> None:
    """Takes out the updates that claim far more examples than the others, of clients whose handshake named no number.

    All others' numbers were compared in the handshake, and a reply repeats them.
    """
    sites, limit = server.exchange.sites, server.experiment.run.examples_limit
    counts = {client: update.examples for client, update in updates.items() if not sites[client].examples}
    refuse(server, updates, implausible(counts, limit))


def compare_metrics(server: Server, updates: dict[str, Update]) -> None:
    """Takes out the updates that report too large a number, of those with which a part computes.

    A training loss that cannot be true and that no part needs is not recorded, and its update counts.
    """
    run, momentum, needs = server.experiment.run, server.experiment.train.momentum, server.parts.needs()
    metrics = {client: update.metrics for client, update in updates.items()}
    refuse(server, updates, metrics_over_limit(metrics, needs, run, momentum))
    if LOSS in needs:
        return
    losses = {client: update.metrics[LOSS] for client, update in updates.items() if LOSS in update.metrics}
    for client, reason in doubtful_losses(losses, server.parts.signed_loss, run.update_limit).items():
        del updates[client].metrics[LOSS]
        server.exchange.notes.note(f"client {client!r}: its {LOSS} is not recorded: {reason}")


def compare_sizes(server: Server, updates: dict[str, Update], checks: UpdateChecks) -> dict[str, float]:
    """Takes out the updates that are too large; returns the sizes of all that were compared."""
    sizes = {client: checks.sizes[client] for client in updates if client in checks.sizes}
    refused = too_large(server, sizes)
    for client, size in sizes.items():
        server.exchange.notes.row(client)["update_norm"] = size
    refuse(server, updates, refused)
    return sizes


def refuse(server: Server, updates: dict[str, Update], reasons: Mapping[str, str]) -> None:
    """Takes the updates of these clients out; each client has failed for its reason."""
    for client, reason in reasons.items():
        if updates.pop(client, None):
            server.exchange.fail(client, f"reply refused: {reason}")


def too_large(server: Server, sizes: Mapping[str, float]) -> dict[str, str]:
    """The clients whose update is too large, with the reason."""
    limit = server.experiment.run.update_limit
    history, _ = server.state.of_part(HISTORY)
    norm = model_norm(server.parts.start) if limit and len(sizes) == 1 else 0.0  # a single size is compared with it
    blamed, _ = server.state.of_part(BLAMED)
    return over_limit(sizes, history, norm, limit, blamed)


def over_norms(server: Server, norms: Mapping[str, float]) -> dict[str, str]:
    """The clients whose contribution to a bank has too large a norm, with the reason."""
    return records_over_limit(norms, server.parts.start, server.experiment.run.update_limit)


def timed(replies: Iterable[Message], notes: RoundNotes) -> Iterator[Message]:
    """The replies; what is done with each counts as time of the aggregation, the wait for the next one does not."""
    for reply in replies:
        started = time.perf_counter()
        yield reply
        del reply
        notes.aggregation_seconds += time.perf_counter() - started


# --- contributions to a bank ----------------------------------------------------------------------------------------


def accept_contributions(server: Server, bank: Bank, replies: Iterable[Message]) -> list[str]:
    """Merges what clients were asked to contribute into a bank; returns the clients that contributed."""
    exchange, parts = server.exchange, server.parts
    views, refusal = parts.views([bank]), f"{bank.name} refused"

    def expect(expected: Expected) -> Expected:
        return replace(expected, banks=(bank,), views=views)

    results, failures = exchange.check(check_collected, replies, refusal, expect, owned)
    entries = exchange.record_failures(results, failures)
    refused = parts.odd(bank, {client: layout_of(arrays) for client, arrays in entries.items()})
    norms, unlike = norms_of(bank, {client: entries[client] for client in entries if client not in refused})
    refused |= unlike | over_norms(server, norms)
    while True:
        for client, reason in refused.items():
            exchange.fail(client, f"{refusal}: {reason}")
            del entries[client]
        try:
            exchange.notes.take(parts.collected(bank, entries))
            return list(entries)
        except RefusedUpdateError as error:
            if error.client not in entries:
                raise
            refused = {error.client: one_line(error.reason)}


def norms_of(bank: Bank, entries: Mapping[str, Arrays]) -> tuple[dict[str, float], dict[str, str]]:
    """The norms of contributions by client, and the clients whose contribution the bank cannot compare, with why."""
    norms: dict[str, float] = {}
    refused: dict[str, str] = {}
    for client, arrays in entries.items():
        try:
            with refusing():
                norms[client] = model_norm(bank.compared(arrays))
        except RejectedReplyError as error:
            refused[client] = str(error)
    return norms, refused


# --- validations ----------------------------------------------------------------------------------------------------


@dataclass
class Complaints:
    """How many clients say that they cannot use a model: its loss is not finite there, or far too large.

    asked: how many clients were asked to validate it
    """

    asked: int
    not_finite: int = 0
    too_large: int = 0

    @property
    def all(self) -> int:
        """The clients of both kinds."""
        return self.not_finite + self.too_large


def check_validations(server: Server, replies: Iterable[Message]) -> tuple[Validations, Failures, Complaints]:
    """(validations by client, failures by client, how many clients cannot use the model).

    Nothing is recorded yet: when the model is taken back, the clients have not failed. A complaint counts only in a
    reply that has no other fault. The replies of the unseen domain are not among these.
    """
    complaints = Complaints(server.exchange.asked)
    lowest, _ = server.state.of_part(LOWEST_LOSSES)

    def check(content: RecordDict, expected: Expected) -> dict[str, float]:
        loss = reported_loss(content, expected)
        if loss is not None and not math.isfinite(loss):
            complaints.not_finite += 1
        elif loss is not None and is_ruined(loss, lowest.get(expected.client)):
            complaints.too_large += 1
        return check_validation(content, expected)

    if server.target:
        replies = server.target.others(replies)
    results, failures = server.exchange.check(check, replies, "validation refused")
    return results, failures, complaints


def accept_validations(server: Server, results: Validations, failures: Failures, used: bool) -> Validations:
    """The validations that count, after they and the failures have been recorded; none of a model that is not used."""
    exchange = server.exchange
    if server.target:
        server.target.take(used=used)
    if not used:
        exchange.record_silent(results, failures)
        return {}
    refuse_implausible(server, results, failures)
    accepted = exchange.record_failures(results, failures)
    lowest, _ = server.state.of_part(LOWEST_LOSSES)
    for client, columns in accepted.items():
        exchange.notes.row(client).update(columns)
        lower(lowest, client, columns["validation_loss"])
    return accepted


def refuse_implausible(server: Server, results: Validations, failures: Failures) -> None:
    """Makes a failure of each validation on a number of examples that cannot be true.

    It is out of proportion to those of the other clients and to the client's own for training.
    """
    limit, sites = server.experiment.run.examples_limit, server.exchange.sites
    counts = {client: int(columns["validation_examples"]) for client, columns in results.items()}
    for client, reason in implausible(counts, limit).items():
        if counts[client] > limit * sites[client].examples:
            failures[client] = f"validation refused: {reason}", ""
            del results[client]
