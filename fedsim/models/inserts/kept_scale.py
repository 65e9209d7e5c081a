"""Activations of kept hidden units are enlarged in training, in compensation for those that were left out."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.hidden import hidden_layers
from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net
from fedsim.parts.facts import Fact


@dataclass(frozen=True)
class KeptScale(Insert):
    """In training, the outputs of fully connected hidden layers are multiplied by 1 / (1 - rate).

    This is dropout's scale for a subnet in which the other units are 0. It has no parameters and no state. `rate = 0`
    gives the network without it.

    Source: FedDrop (Wen, Jeon, Huang: Federated Dropout, 2021); we did not have the paper.

    rate: the probability with which a unit was left out; the part that leaves units out sets it
    """

    rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    order: ClassVar[int] = 4
    assumes = (Fact.BACKBONE_FEATURES,)  # hidden units are found in a chain of linear layers up to the head

    def apply(self, net: Net) -> None:
        """Adds hooks to the layers that read hidden units. Raises UserError where there is no hidden layer."""
        layers = hidden_layers(net)
        if not layers:
            raise UserError(
                "this network has no fully connected hidden layer, so federated dropout has nothing to drop and would "
                "be FedAvg; set model.bottleneck = 256, or use a backbone with hidden layers (digits-cnn, alexnet)"
            )
        scale = 1 / (1 - self.rate)

        def enlarge(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
            return (inputs[0] * scale,) if module.training else None

        for layer in layers if self.rate else []:
            net.get_submodule(layer.reader).register_forward_pre_hook(enlarge)
