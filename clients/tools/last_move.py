"""The last move of the global model, as one client has seen it."""

from torch import Tensor

from clients.local_round import LocalRound

ENTRY = "received-model"  # the entry in the store and in the round's scratch


def last_move(round: LocalRound) -> dict[str, Tensor] | None:
    """The received shared parameters minus those that this client received when it last trained; None the first time.

    The received model is stored for the next round. With all clients in every round this is the last move of the global
    model; with a part of them it is the move since this client's own last round. Call it in `begin`, before the first
    step.
    """
    if ENTRY not in round.scratch:
        received = {name: parameter.detach() for name, parameter in round.shared_parameters().items()}
        stored = round.store.get(ENTRY)
        round.store.put(ENTRY, received)
        move = None if stored is None else {name: new - stored[name].to(new.device) for name, new in received.items()}
        round.scratch[ENTRY] = move
    return round.scratch[ENTRY]
