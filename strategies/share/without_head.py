"""COPA's share rule: every client keeps a classifier of its own."""

from dataclasses import dataclass

from fedsim.models.net import Net
from fedsim.parts.facts import Fact
from strategies.parts import Place, Share


@dataclass(frozen=True)
class WithoutHead(Share):
    """The head stays on its client and is sent with the model; the rest is shared.

    Source: COPA (Wu and Gong, ICCV 2021). The server's own model has the average of the heads. Source clients validate
    it, and its validation selects the round; the unseen domain is predicted by all heads (`ensemble_of_heads`).
    """

    upload = True
    breaks = (Fact.GLOBAL_HEAD,)

    def place(self, net: Net) -> dict[str, Place]:
        """Entries of the head are `upload`, all others `shared`."""
        head = {f"head.{name}" for name in net.head.state_dict()}
        return {name: "upload" if name in head else "shared" for name in net.state_dict()}
