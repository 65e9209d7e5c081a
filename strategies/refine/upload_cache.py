"""The newest personal tensors of every client, so that all clients count in the model for an unseen domain."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedsim.parts.part import part_name
from strategies.aggregate import weighted_mean
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import Arrays, Refine, ServerRound

if TYPE_CHECKING:
    from fedsim.methods.recipe import Recipe


@dataclass(frozen=True)
class UploadCache(Refine):
    """theta[n] = sum of p_k theta_k[n] over all clients that ever replied, for the tensors n that they upload and keep.

    Such tensors (the batch norm of FedBN and gPerXAN, with its score) are never loaded by a client that trains. Without
    this part their mean, in the model for the unseen domain, is over the clients of the round alone. Here the newest
    ones of each client are kept on the server and in the checkpoint; all other tensors stay as they are fused. Where
    every client takes part in every round, nothing changes. What FedIG sends back of the batch norm is this mean too.
    Weights that are measured are refused, because a client that did not reply has none, and so are fusions other than
    the weighted mean.
    """

    needs_clients: ClassVar[bool] = True
    order: ClassVar[int] = 0

    def refuses(self, recipe: "Recipe") -> str:
        """There must be tensors to keep, and weights for clients that are not there."""
        if not recipe.share.upload:
            return "upload_cache needs tensors that clients upload and keep; use the share rule 'without_batch_norm'"
        if recipe.weights.known({"client": 1}) is None:
            return f"upload_cache counts clients that did not reply, which {part_name(recipe.weights)} cannot weigh"
        if not isinstance(recipe.fuse, WeightedMean):
            return (
                f"upload_cache makes weighted means, which {part_name(recipe.fuse)} does not make; use one of the two"
            )
        return ""

    def refine(self, fused: Arrays, server: ServerRound) -> dict[str, np.ndarray]:
        """The fused model with the means over all clients so far."""
        names = [name for name in fused if server.places[name] == "upload"]
        examples = server.state.setdefault("examples", {})
        for update in server.updates:
            examples[update.client] = update.examples
            server.arrays.update({f"{update.client}:{name}": np.array(update.arrays[name]) for name in names})
        seen = [client for client in server.clients if client in examples]
        weights = server.known_weights({client: examples[client] for client in seen})
        states = [{name: server.arrays[f"{client}:{name}"] for name in names} for client in seen]
        return {**fused, **weighted_mean(states, [weights[client] for client in seen])}
