"""The newest personal tensors of every client, so that all clients count in the model for an unseen domain."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.parts.facts import Fact
from strategies.aggregate import weighted_mean
from strategies.parts import ArrayDict, Arrays, Refine, ServerRound


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

    assumes = (Fact.SEVERAL_CLIENTS, Fact.SINGLE_UPDATES, Fact.UPLOAD, Fact.KNOWN_WEIGHTS, Fact.WEIGHTED_MEAN)
    order: ClassVar[int] = 0

    def refine(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """The fused model with the means over all clients so far."""
        names = [name for name in fused if server.places[name] == "upload"]
        examples = server.state.setdefault("examples", {})
        for update in server.updates:
            examples[update.client] = update.examples
            server.arrays.update({f"{update.client}:{name}": np.array(update.arrays[name]) for name in names})
        seen = [client for client in server.clients if client in examples]
        weights = server.known_weights({client: examples[client] for client in seen})
        assert weights is not None  # Fact.KNOWN_WEIGHTS
        states = [{name: server.arrays[f"{client}:{name}"] for name in names} for client in seen]
        return {**fused, **weighted_mean(states, [weights[client] for client in seen])}
