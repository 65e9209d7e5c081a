"""COPA's share rule: every client keeps a classifier of its own."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from strategies.parts import Place, Share


@dataclass(frozen=True)
class WithoutHead(Share):
    """The head stays its client's own and is sent up with the model; the rest is shared.

    COPA (Wu and Gong, ICCV 2021); baselines.md B.9. The server's own model has the average of the heads: source clients
    validate it, and the round is selected by it; the unseen domain is predicted by all heads (`ensemble_of_heads`).
    """

    upload: ClassVar[bool] = True

    def place(self, net: nn.Module) -> dict[str, Place]:
        """Entries of the head are `upload`, all else `shared`."""
        own = {f"head.{name}" for name in net.head.state_dict()}
        return {name: "upload" if name in own else "shared" for name in net.state_dict()}
