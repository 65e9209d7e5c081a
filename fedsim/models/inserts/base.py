"""The contract of inserts: what sits between the backbone's stages."""

from fedsim.models.net import Net
from fedsim.part import Part


class Insert(Part):
    """Hooks modules of its own into the network."""

    def apply(self, net: Net) -> None:
        """Change `net` in place; UserError when the backbone has no place for them."""
        raise NotImplementedError
