"""The last move of the global model, as one client saw it."""

from torch import Tensor

from clients.local_round import LocalRound

ENTRY = "received-model"  # store entry, and place in the round's scratch


def last_move(round: LocalRound) -> dict[str, Tensor] | None:
    """Received shared parameters minus those that this client received when it last trained; None the first time.

    The received model is kept for the next round. With all clients in every round this is the global model's last
    move; with some of them it reaches back to the client's own last round. Call it in `begin`, before the first step.
    """
    if ENTRY not in round.scratch:
        received = {name: parameter.detach() for name, parameter in round.shared_parameters().items()}
        kept = round.store.get(ENTRY)
        round.store.put(ENTRY, received)
        move = None if kept is None else {name: new - kept[name].to(new.device) for name, new in received.items()}
        round.scratch[ENTRY] = move
    return round.scratch[ENTRY]
