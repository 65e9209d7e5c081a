"""FedIG's bank: the averages of the batch norm that clients keep, sent to them beside their own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from strategies.parts import Broadcast, ServerRound

if TYPE_CHECKING:
    from fedsim.methods.recipe import Recipe


@dataclass(frozen=True)
class GlobalBatchNorm(Broadcast):
    """G = {name: theta[name]} for the tensors that clients keep but upload (place `upload`): their fused values.

    Source: FedIG. Clients train with their own batch norm and read the global one beside it. In a client's first round
    its own batch norm starts from the global one. This needs a share rule that uploads the batch norm
    (`without_batch_norm`), and sends its bytes once more to the clients.
    """

    name: ClassVar[str] = "global_bn"
    initial: ClassVar[bool] = True

    def refuses(self, recipe: "Recipe") -> str:
        """Without tensors that clients keep but upload there is nothing to send back."""
        if recipe.share.upload:
            return ""
        return "global_batch_norm has nothing to send; use the share rule 'without_batch_norm' with upload = true"

    def make(self, server: ServerRound) -> dict[str, np.ndarray]:
        """The fused tensors with the place `upload`."""
        return {name: server.current[name] for name, place in server.places.items() if place == "upload"}
