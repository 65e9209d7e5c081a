"""The contract of norm parts: which normalization layers the backbone has."""

from typing import ClassVar

from fedsim.models.net import Net
from fedsim.part import Part


class Norm(Part):
    """Puts its layers in the place of the backbone's batch norm.

    needs_batch_norm: the backbone must have batch norm; one without it is refused in one line.
    """

    needs_batch_norm: ClassVar[bool] = True

    def apply(self, net: Net) -> None:
        """Change the layers of `net` in place."""
        raise NotImplementedError
