"""CCST's bank: style statistics that each client contributes once.

A bank is kept as {client: arrays}. The client part with the same `bank` name computes the contributions and says in
`discloses` what they show about the images. The server only checks, keeps and sends them.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.banks.checks import beyond_images, fault
from strategies.parts import Arrays, Bank, Entries, ServerRound


@dataclass(frozen=True)
class StyleBank(Bank):
    """B = {k: (mu_k, sigma_k)}: channel means and deviations, float32 [J_k, C_s]; J_k = 1 for overall styles.

    Source: CCST (WACV 2023). The whole bank goes to every client, 2 * C_s floats per style; a client leaves out its own
    style where needed. A client that failed when the bank was filled stays missing, because the bank never changes, and
    still gets the styles of the others. Without styles of other clients, clients train on their own images, as in
    FedAvg.
    """

    name: ClassVar[str] = "style"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses wrong names, shapes, NaN, deviations that are not positive, and more styles than images."""
        return style_fault(arrays) or beyond_images(len(arrays["mean"]), client, server)

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """All styles, as `client:mean` and `client:std`."""
        return {f"{owner}:{name}": array for owner, arrays in bank.items() for name, array in arrays.items()}


def style_fault(arrays: Arrays) -> str:
    """The reason why arrays are not styles, `mean` and `std` float32 [J, C_s], or empty."""
    reason = fault(arrays, {"mean": 2, "std": 2})
    if not reason and arrays["mean"].shape != arrays["std"].shape:
        reason = f"mean is {list(arrays['mean'].shape)} but std {list(arrays['std'].shape)}"
    if not reason and not (arrays["std"] > 0).all():
        reason = "a standard deviation is not positive"
    return reason
