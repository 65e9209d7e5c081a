"""FedIG's bank: the averages of the batch norm that clients keep, sent to them next to their own."""

from dataclasses import dataclass
from typing import ClassVar

from fedsim.parts.facts import Fact
from strategies.parts import ArrayDict, Broadcast, ServerRound


@dataclass(frozen=True)
class GlobalBatchNorm(Broadcast):
    """G = {name: theta[name]} for the tensors that clients keep but upload (place `upload`): their fused values.

    Source: FedIG. Clients train with their own batch norm and read the global one next to it. In a client's first round
    its own batch norm starts from the global one. This needs a share rule that uploads the batch norm
    (`without_batch_norm`), and sends its bytes once more to the clients.
    """

    name: ClassVar[str] = "global_bn"
    initial: ClassVar[bool] = True
    assumes = (Fact.SEVERAL_CLIENTS, Fact.UPLOAD)

    def make(self, server: ServerRound) -> ArrayDict:
        """The fused tensors with the place `upload`."""
        return {name: server.current[name] for name, place in server.places.items() if place == "upload"}
