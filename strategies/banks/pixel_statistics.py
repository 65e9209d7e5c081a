"""FedCCRL's bank: the colour statistics of some single images of every client."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from strategies.banks.checks import beyond_images, fault
from strategies.parts import Arrays, Bank, Entries, ServerRound, When

ROUNDING = 1e-3  # by so much the mean of an image in [0, 1] may be outside


@dataclass(frozen=True)
class PixelStatistics(Bank):
    """B = {k: (mean, std)}: channel means and deviations of m_k images of client k in [0, 1], float32 [m_k, C].

    Source: FedCCRL (Wang et al., 2024). A client gets the rows of all other clients, joined in the order of the domains
    (8 C bytes a row), and never its own. A client may have no rows (m_k = 0). The rows of a client that fails, or is
    not drawn, stay as they were.

    refresh: `once` keeps the rows of the images that were drawn before the first round. With `round` the clients of a
    round draw other images before they train, as in the released code; this costs one more exchange, without the model
    shared: false turns the bank off; `aligned_views` sets it where no view gets other colours
    """

    refresh: Literal["once", "round"] = "once"
    shared: bool = True
    name: ClassVar[str] = "pixel_stats"
    with_model: ClassVar[bool] = False

    @property
    def when(self) -> When:
        """The moment at which clients contribute."""
        return "once" if self.refresh == "once" else "before"

    @property
    def discloses(self) -> str:
        """What the rows show."""
        if not self.shared:
            return ""
        what = "channel means and standard deviations of single training images"
        shown = "membership and coarse colour and contrast of an image can be inferred"
        if self.refresh == "once":
            return f"once, to all clients: {what} ({shown})"
        return f"each round, to all clients: {what}, drawn anew and so in the end of nearly all ({shown})"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses other names and shapes, values that no image in [0, 1] has, and more rows than images."""
        reason = fault(arrays, {"mean": 2, "std": 2}, filled=False)
        if reason:
            return reason
        mean, std = arrays["mean"], arrays["std"]
        if mean.shape != std.shape or not mean.shape[1]:
            return f"mean is {list(mean.shape)} and std {list(std.shape)}, expected the same images and channels"
        if ((mean < -ROUNDING) | (mean > 1 + ROUNDING)).any() or ((std <= 0) | (std > 1)).any():
            return "it holds a mean or a standard deviation that no image in [0, 1] has"
        return beyond_images(len(mean), client, server)

    def compared(self, arrays: Arrays) -> Arrays:
        """The mean row, because the number of rows follows the number of images."""
        return {name: array.mean(0) if len(array) else array for name, array in arrays.items()}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """`mean` and `std` [sum m_j, C] of all other clients; an empty record where these have no rows."""
        others = [bank[owner] for owner in server.clients if owner in bank and owner != client]
        if not any(len(arrays["mean"]) for arrays in others):
            return {}
        return {name: np.concatenate([arrays[name] for arrays in others]) for name in ("mean", "std")}
