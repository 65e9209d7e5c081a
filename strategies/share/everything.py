"""FedAvg's share rule: everything is shared."""

from dataclasses import dataclass

from fedsim.models.net import Net
from strategies.parts import Place, Share


@dataclass(frozen=True)
class Everything(Share):
    """All state entries are shared: trainable tensors, batch-norm statistics and counters (FedAvg)."""

    assumes = ()

    def place(self, net: Net) -> dict[str, Place]:
        """Every entry is `shared`."""
        return dict.fromkeys(net.state_dict(), "shared")
