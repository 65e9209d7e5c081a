"""FedDyn's server part: it moves the clients' mean further by all past moves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedsim.models.norms.mixig import MixIG
from fedsim.parts.part import part_name
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import Arrays, Refine, ServerRound
from strategies.refine.flower_optimizer import server_optimizers
from strategies.tools.moves import mean_move, moves

if TYPE_CHECKING:
    from fedsim.methods.recipe import Recipe


@dataclass(frozen=True)
class DynamicCorrection(Refine):
    """H <- H + (1/N) sum_k (theta_k - theta); theta <- fused + H over the shared parameters; H starts at 0.

    Source: FedDyn (Acar et al., ICLR 2021). N counts all clients of the federation, drawn or not. All other tensors
    take their fused value, so that the running statistics of batch norm fit the clients' models, and not the model
    after H was added. The paper averages the clients uniformly. H is kept in the checkpoint. Fusions other than the
    weighted mean are refused, and so are Flower's server optimizers, whose moments would add H up once more, and the
    adapters of `mix_ig`: the client's term changes gradients of the main step, which does not train them.
    """

    needs_clients: ClassVar[bool] = True
    order: ClassVar[int] = 0

    def refuses(self, recipe: "Recipe") -> str:
        """H fits the mean of the models alone."""
        optimizers = server_optimizers(recipe)
        if optimizers:
            return (
                f"dynamic_correction adds all past moves to the model, which {optimizers[0]} would take for a new move "
                "in every round, so that the model diverges; use one of the two"
            )
        if isinstance(recipe.norm, MixIG) and recipe.norm.adapter:
            return (
                "dynamic_correction adds all past moves to the adapters of mix_ig too, which are trained in a step of "
                "their own, so that no client pulls them back; use one of the two"
            )
        if isinstance(recipe.fuse, WeightedMean):
            return ""
        return (
            "dynamic_correction adds to the mean of the clients' models, which "
            f"{part_name(recipe.fuse)} does not make; use one of the two"
        )

    def refine(self, fused: Arrays, server: ServerRound) -> dict[str, np.ndarray]:
        """The corrected parameters; H is in float64."""
        deltas, result = moves(server.updates, server), dict(fused)
        for name in deltas[0]:
            change = mean_move(deltas, [1 / len(server.clients)] * len(deltas), name)
            total = server.arrays[name] = server.arrays.get(name, 0.0) + change
            result[name] = np.asarray(fused[name] + total, dtype=fused[name].dtype)
        return result
