"""The contract of norm parts: they choose the normalization layers of the backbone."""

from typing import ClassVar

from fedsim.models.net import Net
from fedsim.parts.part import Part


class Norm(Part):
    """Replaces the backbone's batch norm by its own layers.

    needs_batch_norm: the backbone must have batch norm; a backbone without it is refused in one line
    keeps_batch_norm: the network still has BatchNorm2d layers that normalize by their own statistics
    second_view: its layers can normalize a second pass by other statistics, without a change of their own
    """

    second_view: ClassVar[bool] = False
    needs_batch_norm: ClassVar[bool] = True

    @property
    def keeps_batch_norm(self) -> bool:
        """Whether inference rules that exchange batch-norm statistics can act on this network."""
        return False

    def apply(self, net: Net) -> None:
        """Changes the layers of `net` in place."""
        raise NotImplementedError
