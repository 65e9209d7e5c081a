"""FedHEAL's client part: a weight leaves its client only where it moves as it did in the rounds before."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.parts import LocalRound, Term
from fedsim.common.tasks import ANY_TASK
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned
from strategies.server_round import Arrays

HISTORY = "update-signs"  # the store's entry: for each weight the share of rounds in which it fell
COUNT = "rounds"  # in that entry: the number of these rounds
RECEIVED = "received-weights"  # in the round's scratch


def consistent(falls: Tensor, history: Tensor | None, count: int, tau: float) -> tuple[Tensor, Tensor]:
    """(mask, new history) of a tensor: whether it may leave, and the share of rounds in which it fell or stayed.

    c = h where it falls and 1 - h elsewhere, mask = c > tau, h <- (h t + falls) / (t + 1). Without a history all leave.
    falls is bool, history h float of that shape, and count t the number of rounds in h.
    """
    share = falls.float()
    if history is None:
        return torch.ones_like(falls), share
    agreement = torch.where(falls, history, 1 - history)
    return agreement > tau, (history * count + share) / (count + 1)


@dataclass(frozen=True)
class ConsistentUpdate(Term):
    """theta_k[i] leaves as it was received unless c > tau, where c is the share of past rounds with the same direction.

        u = theta - theta_k,  c = h where u >= 0 and 1 - h elsewhere,  h <- (h t + [u >= 0]) / (t + 1)

    Source: FedHEAL (Chen et al., CVPR 2024), its federated parameter-harmonized locality, from the released code
    (yuhangchen0/FedHEAL 770e094). It acts on each coordinate of all floating-point tensors that are shared, running
    statistics too. In the client's first round everything leaves. h takes one number for each weight; it is in the
    client's own store and never leaves it. t counts the rounds in which this client took part. The server sees a kept
    weight as one that did not move. The term adds nothing to the loss. `tau = 0` still keeps weights that moved the
    other way in all rounds.

    tau: the share of past rounds that must agree with the direction, 0.3 in the paper
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False
    assumes = (Fact.WHOLE_MODEL,)

    tau: Annotated[float, Field(ge=0, lt=1), Tuned("0.1,0.3,0.4", "ours: around the paper's 0.3")] = 0.3

    def begin(self, round: LocalRound) -> None:
        """Keeps the received tensors for the round."""
        round.scratch[RECEIVED] = {name: tensor.clone() for name, tensor in self._shared(round).items()}

    def end(self, round: LocalRound) -> None:
        """Compares the directions with those of the rounds before, and stores them."""
        stored = round.store.get(HISTORY) or {}
        count = int(stored[COUNT]) if stored else 0
        trained, received = self._shared(round), round.scratch.pop(RECEIVED)
        history, round.scratch[HISTORY] = {COUNT: torch.tensor(count + 1)}, {}
        for name, tensor in received.items():
            falls = (tensor - trained[name] >= 0).cpu()
            mask, history[name] = consistent(falls, stored.get(name), count, self.tau)
            round.scratch[HISTORY][name] = mask.numpy()
        round.store.put(HISTORY, history)

    def leave(self, round: LocalRound, trained: Arrays, received: Arrays) -> Arrays:
        """The trained tensors, with the received value where a weight changed its direction."""
        masks = round.scratch[HISTORY]
        kept = {name: np.where(mask, trained[name], received[name]) for name, mask in masks.items()}
        return {**trained, **kept}

    def _shared(self, round: LocalRound) -> dict[str, Tensor]:
        """The floating-point tensors of the network that all clients share."""
        state = round.net.state_dict()
        return {
            name: tensor.detach()
            for name, tensor in state.items()
            if round.places.get(name, "shared") == "shared" and tensor.is_floating_point()
        }
