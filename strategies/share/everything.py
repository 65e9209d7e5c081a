"""FedAvg's share rule: everything is shared."""

from dataclasses import dataclass

from strategies.parts import Share


@dataclass(frozen=True)
class Everything(Share):
    """All state entries are shared: trainable tensors, batch-norm statistics and counters (FedAvg)."""

    assumes = ()
