"""The base of all parts of a recipe: what a part declares, and what others may ask of it."""

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from fedsim.experiment import Experiment


class Part:
    """A part answers one question of a recipe. Its fields are a paper's hyper-parameters; these declarations are ours.

    requires: parts that must be in the recipe too, as {slot: settings name}; they are added where they are missing.
    needs: metrics that every reply must carry; a reply without them is refused.
    tag: what the method's name in results shows of this part, as in `ccst(pixel)`; empty: nothing.
    discloses: what this part tells the server or other clients about a client's data; empty: nothing beyond the model.
    """

    requires: ClassVar[dict[str, str]] = {}
    needs: ClassVar[tuple[str, ...]] = ()

    @property
    def tag(self) -> str:
        """Short text that tells variants of this part apart in results; empty: none."""
        return ""

    @property
    def discloses(self) -> str:
        """What this part discloses beyond the model's updates; empty: nothing."""
        return ""

    def check(self, experiment: "Experiment") -> None:
        """Raise UserError when the experiment lacks what this part needs, or when a field is out of its range."""
