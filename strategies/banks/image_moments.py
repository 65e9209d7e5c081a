"""FedRDN's bank: how bright and how contrasted the images of each client are, per channel."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.banks.checks import fault
from strategies.parts import Arrays, Bank, Entries, ServerRound


@dataclass(frozen=True)
class ImageMoments(Bank):
    """B = {k: (m_k, s_k)}: the means over client k's training images of the channels' means and deviations.

    Source: FedRDN (Yan et al., CVPR 2025). Each is float32 [1, C]; a client sends them once, before round 1
    (8 C bytes). Every client gets those of all K clients, its own among them, in the order of the domains. A client
    that failed to send its own is missing.
    """

    name: ClassVar[str] = "image_moments"
    with_model: ClassVar[bool] = False
    discloses: ClassVar[str] = (
        "once, to all clients: means over the training images of the channels' means and standard deviations (2 C "
        "numbers; how bright, contrasted and coloured a client's images are)"
    )

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses other names and shapes, and deviations that are not above 0."""
        reason = fault(arrays, {"mean": 2, "std": 2})
        if reason:
            return reason
        mean, std = arrays["mean"], arrays["std"]
        if mean.shape != std.shape or len(mean) != 1:
            return f"mean is {list(mean.shape)} and std {list(std.shape)}, expected one row each of the same channels"
        return "" if (std > 0).all() else "it holds a standard deviation of 0: a channel of its images does not vary"

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """`mean` and `std` [K, C] of all clients, the same record for each; empty before there is any."""
        rows = [bank[owner] for owner in server.clients if owner in bank]
        return {name: np.concatenate([arrays[name] for arrays in rows]) for name in ("mean", "std") if rows}
