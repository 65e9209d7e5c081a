"""The mean of each coordinate over those clients alone that moved it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.parts.facts import Fact
from strategies.aggregate import weighted_mean
from strategies.parts import ArrayDict, Fuse, ServerRound, Update


@dataclass(frozen=True)
class MaskedMean(Fuse):
    """theta[i] <- theta[i] + sum_k p_k m_k delta_k[i] / sum_k p_k m_k,  m_k = [delta_k[i] is not 0].

    Source: FedHEAL (Chen et al., CVPR 2024), the update of its released code (yuhangchen0/FedHEAL 770e094). The part
    `consistent_update` lets a weight leave as it was received where the paper's mask is 0. A weight that did not move
    for another reason counts as masked here too, and does not slow the others down, which differs from the paper. A
    coordinate that no client moved stays. It acts on all floating-point tensors, running statistics too; integer
    buffers take their maximum. Where all clients move all coordinates it is FedAvg.
    """

    assumes = (Fact.SEVERAL_CLIENTS, Fact.EVERY_ENTRY, Fact.STILL_ENTRIES)

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The fused model, tensor by tensor."""
        shares = [weights[update.client] for update in updates]
        fused = weighted_mean([update.arrays for update in updates], shares)
        names = [name for name, array in fused.items() if array.dtype.kind == "f" and name in server.previous]
        for name in names:
            start = np.asarray(server.previous[name], np.float64)
            total, mass = np.zeros(start.shape), np.zeros(start.shape)
            for share, update in zip(shares, updates, strict=True):
                delta = update.arrays[name] - start
                total += share * delta
                mass += share * (delta != 0)
            step = np.divide(total, mass, out=np.zeros(start.shape), where=mass > 0)
            fused[name] = np.asarray(start + step, dtype=fused[name].dtype)
        return fused
