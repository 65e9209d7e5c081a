"""What the server asks of a recipe."""

from dataclasses import Field
from typing import ClassVar, Protocol

from fedsim.models.infer.base import Infer
from fedsim.parts.part import RecipeParts
from strategies.parts import Bank, Fuse, Refine, Share, Visit, Weights


class ServerRecipe(RecipeParts, Protocol):
    """What the server asks of a recipe, which is a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field]]

    @property
    def share(self) -> Share:
        """Which tensors travel."""

    @property
    def weights(self) -> Weights:
        """How much each client counts."""

    @property
    def fuse(self) -> Fuse:
        """How the tensors of several clients become one."""

    @property
    def banks(self) -> tuple[Bank, ...]:
        """The records beside the model."""

    @property
    def refine(self) -> tuple[Refine, ...]:
        """What happens to the fused model, in this order."""

    @property
    def visits(self) -> tuple[Visit, ...]:
        """The exchanges with the unseen domain's client."""

    @property
    def infer(self) -> Infer:
        """How the model predicts on the unseen domain."""

    def needs(self) -> set[str]:
        """The metrics without which a reply cannot be used."""
