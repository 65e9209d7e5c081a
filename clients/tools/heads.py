"""The classifiers of all clients, from the bank `heads`."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.func import functional_call

from clients.parts import LocalRound


def heads_of(round: LocalRound, wanted_by: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """h_j by client, as functions from features to logits; frozen tensors of a head are the same for all."""
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in round.tensors("heads", wanted_by).items():
        owner, _, name = key.rpartition(":")
        states.setdefault(owner, {})[name.removeprefix("head.")] = tensor
    head = round.net.head
    return {owner: partial(functional_call, head, state) for owner, state in states.items()}
