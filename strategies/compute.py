"""Computes the model of a round from its updates, without the clients whose updates cannot be used.

    weigh -> fuse -> merge the banks -> visits -> refine -> make the broadcasts

A part may refuse what one client sent. That client has then failed, all parts get the state back with which the round
began, and the model is computed again from the other updates. So it is with a client that makes the model unusable:
one whose values or outputs are not finite, or that moved much further than every update. Where no model can be used,
the round leaves everything as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flwr.serverapp import Grid

from fedsim.common.errors import ClientFailedError
from fedsim.parts.part import Part
from strategies.accept import BLAMED, HISTORY, Complaints
from strategies.banks.checks import misfit, owned
from strategies.parts import (
    SERVER,
    ArrayDict,
    Arrays,
    Bank,
    Broadcast,
    LostRoundError,
    RefusedUpdateError,
    ServerRound,
    Update,
    Visit,
)
from strategies.server import Server
from strategies.server_parts import ServerParts
from strategies.state import Snapshot
from strategies.weights.checks import weights_of
from strategies.wire.fused_check import largest, not_finite, suspect
from strategies.wire.limits import RUINED, STANDS_OUT, either, remember, update_size
from strategies.wire.reply_checks import one_line
from strategies.wire.visits import ask_target, refuse_answer

LARGE = 1e4  # below this, sums and products of a network stay far from the largest float32
MOST_LOST = 5  # rounds in a row that leave the model as it was, before the run ends


def compute(
    server: Server, grid: Grid, updates: Sequence[Update], sizes: Mapping[str, float], before: Snapshot
) -> ArrayDict:
    """The new tensors of a round; none when the model stays as it was.

    sizes: of the updates, by client. before: the server's state with which the round began
    """
    state = server.state
    # Banks alone have changed a part's state since the round began. A copy costs time: 0.45 s for FedAdam's moments of
    # a ResNet-50.
    start = state.saved_parts() if server.parts.recipe.banks else before.parts
    while updates:
        try:
            view, fused, move = compute_once(server, grid, updates)
        except LostRoundError as error:
            take_back(server, before, "", str(error))
            return {}
        except RefusedUpdateError as error:
            updates = without_refused(server, updates, error)
            if server.parts.recipe.fuse.masked:
                reason = f"the sum of the updates cannot be taken apart, and {error.client!r} is in it"
                take_back(server, before, "", reason)
                return {}
            state.restore_parts(start)
            continue
        reason = unusable(server, fused) or too_far(server, move, updates, sizes)
        if not reason:
            note_down(server, view, updates, sizes, used=True)
            state.banks = dict(view.banks)
            return fused
        client = culprit(server, grid, updates, sizes, start)
        if not client:
            state.restore(before)
            note_down(server, view, updates, sizes, used=False)
            drop(server, reason)
            return {}
        state.restore_parts(start)
        server.exchange.fail(client, f"reply refused: with it, {reason}; without it the model is usable")
        updates = without(updates, client)
    state.restore(before)
    server.exchange.notes.dropped = "no reply was accepted"
    server.exchange.notes.note("no reply was accepted; the model stays as it was")
    return {}


def without_refused(server: Server, updates: Sequence[Update], error: RefusedUpdateError) -> list[Update]:
    """The updates without that of a client that a part has refused, which is recorded.

    Raises the error again when it names no client of these updates.
    """
    if error.client not in [update.client for update in updates]:
        raise error
    server.exchange.fail(error.client, f"reply refused: {one_line(error.reason)}")
    return without(updates, error.client)


def without(updates: Sequence[Update], client: str) -> list[Update]:
    """The updates of all other clients."""
    return [update for update in updates if update.client != client]


def compute_once(server: Server, grid: Grid, updates: Sequence[Update]) -> tuple[ServerRound, ArrayDict, float]:
    """(the round as its parts left it, the new tensors, how far the model moved where that may be too far).

    Only the parts' own states are changed. A model that is not finite is returned as soon as it exists.
    """
    parts = server.parts
    view = parts.whole_round(updates)
    visit(server, grid, "updates", dict(parts.start), view)
    fused = weigh_and_fuse(parts, updates, view)
    move = update_size(fused, parts.start) if parts.recipe.fuse.amplifies else 0.0
    if parts.recipe.fuse.masked:
        view.updates = [replace(update, arrays={}) for update in updates]
    for bank in parts.banks("round") if parts.training else []:
        if not isinstance(bank, Broadcast):
            view.banks = {**view.banks, bank.name: merged(server, bank, updates, view)}
    fused = visit(server, grid, "model", fused, view)
    for key, part in parts.refining():
        if not_finite(fused):
            return view, fused, move
        fused = same_layout(part, part.refine(fused, parts.view(view, key)), fused)
    view.current = parts.start_from({**parts.start, **fused})
    for broadcast in parts.broadcasts():
        view.banks = {**view.banks, broadcast.name: parts.made(broadcast, view)}
    return view, fused, move


def weigh_and_fuse(parts: ServerParts, updates: Sequence[Update], view: ServerRound) -> ArrayDict:
    """The fused tensors of the updates; `view` gets the clients' weights."""
    recipe = parts.recipe
    view.weights = weights_of(recipe.weights, updates, parts.view(view, "weights"))
    fused = recipe.fuse.fuse(updates, view.weights, parts.view(view, "fuse"))
    names = updates[0].arrays
    like = {name: parts.start[name] for name in names} if recipe.fuse.masked else names
    return same_layout(recipe.fuse, fused, like)


def merged(server: Server, bank: Bank, updates: Sequence[Update], view: ServerRound) -> dict[str, Arrays]:
    """A bank of every round with the contributions of these updates."""
    bank_view = server.parts.bank_view(bank, view)
    old = view.banks.get(bank.name, {})
    contributions = {update.client: bank.gather(update, bank_view) for update in updates}
    new = bank.merge(old, contributions, bank_view)
    # The updates' tensors last as long as the round: what the bank keeps of them is copied.
    return {owner: arrays if arrays is old.get(owner) else owned(arrays) for owner, arrays in new.items()}


def same_layout(part: Part, arrays: Arrays, like: Arrays) -> ArrayDict:
    """The tensors that a part returned. ValueError names a part with a bug: they are not the model's."""
    if reason := misfit(arrays, like):
        raise ValueError(f"{type(part).__name__} returned tensors that are not the model's: {reason}")
    return dict(arrays)


# --- visits to the unseen domain ------------------------------------------------------------------------------------


def visit(server: Server, grid: Grid, moment: str, model: ArrayDict, view: ServerRound) -> ArrayDict:
    """The model after the visits of a moment; `view` gets the answers, and the banks that they fill."""
    parts, state = server.parts, server.state
    visits = parts.recipe.visits if parts.training else ()
    for each in [each for each in visits if each.moment == moment]:
        before = state.saved_parts(), view.answers, view.banks
        try:
            model = visit_once(server, grid, each, model, view)
        except RefusedUpdateError as error:
            if error.client != server.experiment.run.target:
                raise
            saved, view.answers, view.banks = before
            state.restore_parts(saved)
            refuse_answer(server.exchange, each, error.reason)
    return model


def visit_once(server: Server, grid: Grid, visit: Visit, model: ArrayDict, view: ServerRound) -> ArrayDict:
    """The model after one visit; the same model when nothing was asked, or no answer is accepted."""
    parts, key = server.parts, f"visits.{visit.phase}"
    before = parts.view(view, key)
    question = visit.ask(model, before)
    answer = None if question is None else ask_target(server.exchange, grid, visit, question, before)
    if answer is None:
        return model
    view.answers = {**view.answers, visit.phase: answer}
    if visit.bank:
        view.banks = {**view.banks, visit.bank: {SERVER: owned(answer[visit.bank])}}
    return same_layout(visit, visit.take(answer, model, parts.view(view, key)), model)


# --- what makes a model unusable ------------------------------------------------------------------------------------


def unusable(server: Server, fused: Arrays) -> str:
    """The reason why a fused model must not be sent; empty when it may be sent."""
    previous = server.parts.start
    if broken := not_finite(fused):
        return f"the aggregate of {broken!r} is not finite"
    if server.probe is None or not largest(fused) > LARGE:
        return ""
    sound = server.probe({**previous, **fused}) or not server.probe(previous)
    return "" if sound else "the outputs of the aggregated model are not finite"


def too_far(server: Server, move: float, updates: Sequence[Update], sizes: Mapping[str, float]) -> str:
    """The reason why a model that moved that far must not be used; empty when it may be used."""
    limit = server.experiment.run.update_limit
    largest_update = max((sizes.get(update.client, 0.0) for update in updates), default=0.0)
    if not limit or not largest_update or move <= limit * largest_update:
        return ""
    times = f"{move / largest_update:.3g} times as far as the largest update"
    return f"the aggregated model moves {times}; run.update_limit is {limit:g}"


def culprit(
    server: Server, grid: Grid, updates: Sequence[Update], sizes: Mapping[str, float], start: tuple[dict, dict]
) -> str:
    """The client without which the model is usable, the largest update first; empty when there is none.

    Of masked updates only the sum can be read, so that no client can be left out.
    """
    if server.parts.recipe.fuse.masked:
        return ""
    for update in sorted(updates, key=lambda update: -sizes.get(update.client, 0.0)):
        rest = without(updates, update.client)
        if not rest:
            continue
        server.state.restore_parts(start)
        _, fused, move = compute_once(server, grid, rest)
        if not (unusable(server, fused) or too_far(server, move, rest, sizes)):
            return update.client
    return ""


def useless(sizes: Mapping[str, float], complaints: Complaints, asked: int) -> tuple[str, str]:
    """(client, reason) when most of the clients asked cannot use the model; two empty texts when they can.

    sizes: of this round's updates. The client is the one whose update is much larger than the others'; empty when there
    is none. A loss that is finite and far too large counts where there is such an update among others. Honest clients
    that diverge together, or one that trains alone, do the same to it. Of two clients one such loss is enough, and
    neither is named.
    """
    client, times = suspect(sizes)
    stands_out = bool(client) and times >= STANDS_OUT
    among_others = stands_out and len(sizes) > 1
    largest_is = f" (the largest is that of {client!r})" if client else ""
    if 2 * complaints.not_finite > asked:
        reason = f"the model's loss is not finite at {complaints.not_finite} of {asked} sites"
    elif among_others and (2 * complaints.all > asked or (asked == 2 and complaints.all)):
        reason = (
            f"the model's loss is {RUINED:g} times what it was, or not finite, at {complaints.all} of {asked} sites"
        )
        if asked == 2:
            return "", f"{reason}{either(2)}"
    else:
        return "", ""
    if stands_out:
        return client, f"{reason}; its update has {times:.3g} times the norm of the others'"
    return "", f"{reason}, and no update stands out{largest_is}" if client else reason


# --- what is recorded -----------------------------------------------------------------------------------------------


def take_back(server: Server, before: Snapshot, client: str, reason: str) -> None:
    """Gives the server the state with which the round began; the client, if one is named, has failed."""
    server.state.restore(before)
    if client:
        blamed, _ = server.state.of_part(BLAMED)
        blamed[client] = True
        server.exchange.fail(client, f"reply refused: {reason}; the model of the round before is kept")
        server.exchange.notes.drop(f"the model was taken back because of {client!r}")
    else:
        drop(server, reason)


def drop(server: Server, reason: str) -> None:
    """Notes that the round has no model of its own, or ends the run."""
    notes = server.exchange.notes
    if server.experiment.run.on_client_failure == "stop":
        raise ClientFailedError(f"round {notes.round}: {reason}")
    notes.drop(reason)
    notes.note(f"{reason}; the model stays as it was")


def end_if_lost(server: Server) -> None:
    """Ends the run when MOST_LOST rounds in a row have left the model as it was: it would make no progress any more.

    Raises ClientFailedError with the reasons of the last one.
    """
    notes = server.exchange.notes
    server.lost_rounds = server.lost_rounds + 1 if notes.dropped else 0
    if server.lost_rounds >= MOST_LOST:
        raise ClientFailedError(
            f"rounds {notes.round - MOST_LOST + 1} to {notes.round} left the model as it was, and the run ends; in the "
            f"last one {notes.dropped}; the same command continues it"
        )


def note_down(
    server: Server, view: ServerRound, updates: Sequence[Update], sizes: Mapping[str, float], used: bool
) -> None:
    """Writes the round into its notes, and what the clients keep from now on into the state."""
    notes, state = server.exchange.notes, server.state
    history, _ = state.of_part(HISTORY)
    for update in updates:
        if update.client in sizes:
            remember(history, update.client, sizes[update.client])
    for update in updates:
        notes.row(update.client).update(examples=update.examples, **update.metrics)
        if update.stored and used:
            state.stored[update.client] = notes.round
    server.parts.keep([update.client for update in updates] if used else [])
    for client, weight in view.weights.items():
        notes.row(client)["weight"] = float(weight)
    notes.take(view)
    for client, columns in view.client_columns.items():
        notes.row(client).update(columns)
