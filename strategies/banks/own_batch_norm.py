"""Every client's own batch norm, kept by the server for inference rules that need it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedsim.arrays import Kind
from strategies.parts import Arrays, Bank, Entries, ServerRound, Update


@dataclass(frozen=True)
class OwnBatchNorm(Bank):
    """U = {k: batch norm of theta_k}: each client's newest set, taken from the model that it sends up anyway.

    Baselines.md D.2. A set is the whole batch-norm side (affine and statistics) where the share rule keeps that on the
    client, else the statistics alone. No client gets it; the inference rule of the unseen domain does.
    """

    name: ClassVar[str] = "own_batch_norm"
    when: ClassVar[Literal["once", "round"]] = "round"
    contributed: ClassVar[bool] = False

    def gather(self, update: Update, server: ServerRound) -> Arrays:
        """The client's own batch norm of this round."""
        kinds, places = server.kinds, server.places
        own = [name for name in update.arrays if places[name] == "upload"]
        names = [name for name in own if kinds[name] in (Kind.BN_AFFINE, Kind.BN_STATISTICS)]
        names = names or [name for name in update.arrays if kinds[name] is Kind.BN_STATISTICS]
        return {name: update.arrays[name] for name in names}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> None:
        """Nothing goes to the clients."""

    def traffic(self, server: ServerRound) -> tuple[int, int]:
        """Nothing travels for it."""
        return 0, 0
