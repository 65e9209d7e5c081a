"""The contract of inserts: modules between the stages of the backbone, or beside the head."""

from typing import ClassVar

from fedsim.models.net import Net
from fedsim.part import Part
from fedsim.tasks import CLASSIFICATION


class Insert(Part):
    """Adds modules of its own to the network.

    second_view: they can act in a second pass alone (their attribute `second_view` switches them)
    """

    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION.name,)

    second_view: ClassVar[bool] = False

    def apply(self, net: Net) -> None:
        """Changes `net` in place. Raises UserError when the backbone has no place for the insert.

        torch's global generator is seeded for the initial weights of the insert, equally in every process of a run.
        """
        raise NotImplementedError
