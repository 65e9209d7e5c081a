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

from strategies.accept import HISTORY
from strategies.banks.checks import owned, same_layout
from strategies.parts import (
    ArrayDict,
    Arrays,
    Bank,
    Broadcast,
    LostRoundError,
    RefusedUpdateError,
    ServerRound,
    Update,
)
from strategies.server import Server
from strategies.server_parts import ServerParts
from strategies.state import SavedParts, Snapshot
from strategies.unusable import NO_REPLY, cannot_be_sent, moved_too_far, take_back
from strategies.weights.checks import weights_of
from strategies.wire.fused_check import not_finite
from strategies.wire.limits import remember, update_size
from strategies.wire.reply_checks import one_line
from strategies.wire.visits import make_visits


def compute(
    server: Server, grid: Grid, updates: Sequence[Update], sizes: Mapping[str, float], before: Snapshot
) -> ArrayDict:
    """The new tensors of a round; none when the model stays as it was, and `take_back` has restored the state.

    sizes: of the updates, by client. before: the server's state with which the round began

    A round is taken back for one of these reasons:

    | reason | where it is found |
    |---|---|
    | a part says that no model can be made | LostRoundError of the part |
    | a refused client is in a sum of masked updates, which cannot be taken apart | `compute_usable` |
    | the model is unusable, and no single client is the cause | `compute_usable` |
    | no update is left | `compute_usable` |
    | the clients that validated the model cannot use it | `play_round`, after this function |
    """
    # Since the round began only banks can have changed the state of a part. Without banks the copy in `before` serves,
    # because another one costs time: 0.45 s for FedAdam's moments of a ResNet-50.
    saved_parts = server.state.saved_parts() if server.parts.recipe.banks else before.parts
    try:
        view, fused, used = compute_usable(server, grid, updates, sizes, saved_parts)
    except LostRoundError as error:
        take_back(server, before, str(error))
        return {}
    server.exchange.notes.take_model(view, used)
    keep(server, view, used, sizes)
    return fused


def compute_usable(
    server: Server, grid: Grid, updates: Sequence[Update], sizes: Mapping[str, float], saved_parts: SavedParts
) -> tuple[ServerRound, ArrayDict, Sequence[Update]]:
    """(the round as its parts left it, the new tensors, the updates that made them); each refused client has failed.

    Raises LostRoundError with the reason when no usable model can be made.
    """
    while updates:
        try:
            view, fused, move = compute_once(server, grid, updates)
        except RefusedUpdateError as error:
            updates = without_refused(server, updates, error)
            if server.parts.recipe.fuse.masked:
                reason = f"the sum of the updates cannot be taken apart, and {error.client!r} is in it"
                raise LostRoundError(reason) from error
        else:
            reason = cannot_be_sent(server, fused) or moved_too_far(server, move, updates, sizes)
            if not reason:
                return view, fused, updates
            client = culprit(server, grid, updates, sizes, saved_parts)
            if not client:
                server.exchange.notes.take_model(view, updates)
                raise LostRoundError(reason)
            server.exchange.fail(client, f"reply refused: with it, {reason}; without it the model is usable")
            updates = without(updates, client)
        server.state.restore_parts(saved_parts)
    raise LostRoundError(NO_REPLY)


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


def culprit(
    server: Server, grid: Grid, updates: Sequence[Update], sizes: Mapping[str, float], saved_parts: SavedParts
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
        server.state.restore_parts(saved_parts)
        try:
            _, fused, move = compute_once(server, grid, rest)
        except (LostRoundError, RefusedUpdateError):
            continue  # without this client no model can be made either
        if not (cannot_be_sent(server, fused) or moved_too_far(server, move, rest, sizes)):
            return update.client
    return ""


def compute_once(server: Server, grid: Grid, updates: Sequence[Update]) -> tuple[ServerRound, ArrayDict, float]:
    """(the round as its parts left it, the new tensors, how far the model moved where that may be too far).

    Only the parts' own states are changed. A model that is not finite is returned as soon as it exists.
    """
    parts = server.parts
    view = parts.whole_round(updates)
    make_visits(server, grid, "updates", dict(parts.start), view)
    fused = weigh_and_fuse(parts, updates, view)
    move = update_size(fused, parts.start) if parts.recipe.fuse.amplifies else 0.0
    if parts.recipe.fuse.masked:
        view.updates = [replace(update, arrays={}) for update in updates]
    for bank in parts.banks("round") if parts.training else []:
        if not isinstance(bank, Broadcast):
            view.banks = {**view.banks, bank.name: merged(server, bank, updates, view)}
    fused = make_visits(server, grid, "model", fused, view)
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


def keep(server: Server, view: ServerRound, updates: Sequence[Update], sizes: Mapping[str, float]) -> None:
    """Puts into the state what the round leaves; who failed after its training may have lost what came once."""
    state, notes = server.state, server.exchange.notes
    history, _ = state.of_part(HISTORY)
    for update in updates:
        if update.client in sizes:
            remember(history, update.client, sizes[update.client])
        if update.stored:
            state.stored[update.client] = notes.round
    server.parts.keep([update.client for update in updates if notes.row(update.client)["status"] == "ok"])
    state.banks = dict(view.banks)
