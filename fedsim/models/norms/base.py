"""The contract of norm parts: they choose the normalization layers of the backbone."""

from typing import ClassVar

from fedsim.models.net import Net
from fedsim.parts.facts import Fact, Facts
from fedsim.parts.part import Part


class Norm(Part):
    """Replaces the backbone's batch norm by its own layers.

    second_view: its layers can normalize a second pass by other statistics, without a change of their own
    """

    second_view: ClassVar[bool] = False
    assumes: ClassVar[Facts] = (Fact.IMAGES,)  # batch norm of vectors is left as it is

    @property
    def breaks(self) -> Facts:
        """New layers, with statistics of their own."""
        return (Fact.BATCH_NORM, Fact.PLAIN_LAYERS)

    def apply(self, net: Net) -> None:
        """Changes the layers of `net` in place; a part that breaks PLAIN_LAYERS gets a network with batch norm."""
        raise NotImplementedError
