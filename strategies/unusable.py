"""Says why the model of a round cannot be used, and takes such a round back.

Before a model is sent, it may be refused by `cannot_be_sent` and `moved_too_far`; once the clients have validated it,
by `refused_by_sites`. `take_back` is the one way in which a round leaves everything as it was.
"""

from collections.abc import Mapping, Sequence

from fedsim.common.errors import ClientFailedError
from strategies.accept import BLAMED, Complaints
from strategies.parts import Arrays, Update
from strategies.server import Server
from strategies.state import Snapshot
from strategies.wire.fused_check import client_of_largest_update, largest, not_finite
from strategies.wire.limits import RUINED, STANDS_OUT, either

LARGE = 1e4  # below this, sums and products of a network stay far from the largest float32
MOST_LOST = 5  # rounds in a row that leave the model as it was, before the run ends
NO_REPLY = "no reply was accepted"  # the reason of a round without any update


def cannot_be_sent(server: Server, fused: Arrays) -> str:
    """The reason why a fused model must not be sent; empty when it may be sent."""
    previous = server.parts.start
    if broken := not_finite(fused):
        return f"the aggregate of {broken!r} is not finite"
    if server.probe is None or not largest(fused) > LARGE:
        return ""
    sound = server.probe({**previous, **fused}) or not server.probe(previous)
    return "" if sound else "the outputs of the aggregated model are not finite"


def moved_too_far(server: Server, move: float, updates: Sequence[Update], sizes: Mapping[str, float]) -> str:
    """The reason why a model that moved that far must not be used; empty when it may be used."""
    limit = server.experiment.run.update_limit
    largest_update = max((sizes.get(update.client, 0.0) for update in updates), default=0.0)
    if not limit or not largest_update or move <= limit * largest_update:
        return ""
    times = f"{move / largest_update:.3g} times as far as the largest update"
    return f"the aggregated model moves {times}; run.update_limit is {limit:g}"


def refused_by_sites(sizes: Mapping[str, float], complaints: Complaints) -> tuple[str, str]:
    """(client, reason) when most of the clients asked cannot use the model; two empty texts when they can.

    sizes: of this round's updates. The client is the one whose update is much larger than the others'; empty when there
    is none. A loss that is finite and far too large counts where there is such an update among others. Honest clients
    that diverge together, or one that trains alone, do the same to it. Of two clients one such loss is enough, and
    neither is named.
    """
    asked = complaints.asked
    client, times = client_of_largest_update(sizes)
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


# --- what is then done ----------------------------------------------------------------------------------------------


def take_back(server: Server, before: Snapshot, reason: str, client: str = "") -> None:
    """Gives the server the state with which the round began, and notes why its model is not used.

    The caller goes on with the model of the round before. The client, if one is named, has failed. Where none is named,
    a run with `on_client_failure = "stop"` ends (ClientFailedError).
    """
    run, notes = server.experiment.run, server.exchange.notes
    server.state.restore(before)
    if client:
        blamed, _ = server.state.of_part(BLAMED)
        blamed[client] = True
        server.exchange.fail(client, f"reply refused: {reason}; the model of the round before is kept")
        notes.drop(f"the model was taken back because of {client!r}")
        return
    # Without any reply nobody has failed when such a run comes here: the settings took all clients away.
    if run.on_client_failure == "stop" and reason != NO_REPLY:
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
