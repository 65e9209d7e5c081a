"""The batch norm of every client, which the server keeps for inference rules that need it."""

from dataclasses import dataclass
from typing import ClassVar

from fedsim.tensors.kinds import Kind
from strategies.parts import Arrays, Bank, Entries, ServerRound, Update, When


@dataclass(frozen=True)
class OwnBatchNorm(Bank):
    """U = {k: batch norm of theta_k}: the newest set of each client, taken from the model that it sends in any case.

    A set is the whole batch norm (affine part and statistics) where the share rule keeps that on the client, otherwise
    the statistics alone. No client gets it; the inference rule of the unseen domain does.

    Source: the ensemble of local batch norms in Table 3 of FedIG-A (submission to ICLR 2023).
    """

    name: ClassVar[str] = "own_batch_norm"
    when: ClassVar[When] = "round"
    contributed: ClassVar[bool] = False

    def gather(self, update: Update, server: ServerRound) -> Arrays:
        """The batch norm of this client after this round."""
        kinds, places = server.kinds, server.places
        uploaded = [name for name in update.arrays if places[name] == "upload"]
        names = [name for name in uploaded if kinds[name] in (Kind.BN_AFFINE, Kind.BN_STATISTICS)]
        names = names or [name for name in update.arrays if kinds[name] is Kind.BN_STATISTICS]
        return {name: update.arrays[name] for name in names}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> None:
        """Nothing is sent to the clients."""

    def traffic(self, server: ServerRound) -> tuple[int, int]:
        """Nothing is sent for it."""
        return 0, 0
