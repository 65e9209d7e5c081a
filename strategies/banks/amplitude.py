"""The bank of low-frequency amplitude spectra (ELCFS)."""

from dataclasses import dataclass
from typing import ClassVar

from strategies.banks.checks import beyond_images, fault
from strategies.parts import Arrays, Bank, Entries, ServerRound


@dataclass(frozen=True)
class AmplitudeBank(Bank):
    """A = {k: amplitude spectra of some of its images}, float32 [J_k, C, rows, columns].

    Source: ELCFS / FedDG (CVPR 2021). Each client gets the spectra of all other clients. A client that failed when the
    bank was filled stays missing, and still gets the spectra of the others.
    """

    name: ClassVar[str] = "amplitude"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses wrong names, shapes, NaN, negative amplitudes, and more rows than the client has images."""
        if reason := fault(arrays, {"amplitude": 4}):
            return reason
        negative = "an amplitude is negative" if (arrays["amplitude"] < 0).any() else ""
        return negative or beyond_images(len(arrays["amplitude"]), client, server)

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """The spectra of the other clients, by client."""
        return {owner: arrays["amplitude"] for owner, arrays in bank.items() if owner != client}
