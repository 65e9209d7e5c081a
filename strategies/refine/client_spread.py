"""FedFA's server part: how far the clients' mean styles lie apart goes into the model's buffers."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.parts import ArrayDict, Arrays, Refine, ServerRound

SENT, MADE = ".running_", ".spread_"


@dataclass(frozen=True)
class ClientSpread(Refine):
    """V_c = unbiased variance over the clients of their running statistic of channel c, into the buffers `spread_*`.

    Source: FedFA (Zhou and Konukoglu, ICLR 2023), equation 7. The statistics are the buffers of the insert
    `feature_spread` in the updates of the round. With fewer than two updates V stays. The released code (tfzhou/FedFA
    57e9582) takes one variance over all clients and channels together. Then gamma_c = 1 in every channel, whatever the
    clients sent: its FedFA is DSU with twice the variance, and its exchange has no effect.

    released: one variance over clients and channels, as in the released code
    """

    order: ClassVar[int] = 2
    belongs_to: ClassVar[str] = "feature_spread"

    released: bool = False

    def refine(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """The tensors with the new V."""
        result = dict(fused)
        for name, array in fused.items():
            if not name.startswith("feature_spread.") or MADE not in name:
                continue
            if len(server.updates) < 2:
                result[name] = np.array(server.previous[name])
                continue
            sent = np.stack([update.arrays[name.replace(MADE, SENT)] for update in server.updates]).astype(np.float64)
            spread = sent.var(ddof=1) if self.released else sent.var(axis=0, ddof=1)
            result[name] = np.broadcast_to(spread, array.shape).astype(array.dtype)
        return result
