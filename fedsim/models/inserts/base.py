"""The contract of inserts: what sits between the backbone's stages."""

from typing import ClassVar

from fedsim.models.net import Net
from fedsim.part import Part
from fedsim.tasks import CLASSIFICATION


class Insert(Part):
    """Hooks modules of its own into the network.

    second_view: they can act in a second pass alone (their attribute `second_view` switches them).
    """

    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION.name,)

    second_view: ClassVar[bool] = False

    def apply(self, net: Net) -> None:
        """Change `net` in place; UserError when the backbone has no place for them.

        torch's global generator is seeded for the insert's initial weights, the same in every process of a run.
        """
        raise NotImplementedError
