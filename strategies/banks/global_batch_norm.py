"""The averages of what clients keep to themselves, sent down to be read beside their own (FedIG)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from strategies.parts import Broadcast, ServerRound

if TYPE_CHECKING:
    from fedsim.recipe import Recipe


@dataclass(frozen=True)
class GlobalBatchNorm(Broadcast):
    """G = {name: theta[name]} for the tensors that clients keep but send up (place `upload`): their fused values.

    FedIG, baselines.md F. Clients train with their own batch norm and read the global one beside it; on a client's
    first visit its own starts from the global one. Needs a share rule that uploads the batch-norm side
    (`without_batch_norm`), and costs its bytes once more on the way down.
    """

    name: ClassVar[str] = "global_bn"
    initial: ClassVar[bool] = True

    def refuses(self, recipe: "Recipe") -> str:
        """Without tensors that clients keep but send up there is nothing to send down."""
        if recipe.share.upload:
            return ""
        return "global_batch_norm has nothing to send; use the share rule 'without_batch_norm' with upload = true"

    def make(self, server: ServerRound) -> dict[str, np.ndarray]:
        """The fused tensors of place `upload`."""
        return {name: server.current[name] for name, place in server.places.items() if place == "upload"}
