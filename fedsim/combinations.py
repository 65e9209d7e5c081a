"""Which parts make no sense together, beyond what a single part can say of itself."""

from typing import Any

from clients.fedig import ClientAgnostic
from fedsim.errors import UserError
from fedsim.models.norms import IBN, BatchNorm, MixIG


def check_batch_norm(recipe: Any, name: str) -> None:
    """Parts that act on batch-norm layers need layers that they can act on, and their global averages."""
    norm, step = recipe.norm, recipe.client
    mirrored = getattr(recipe.share, "mirror", False)
    if isinstance(step, ClientAgnostic) and isinstance(norm, MixIG) and not mirrored:
        raise UserError(f"{name}: mix_ig needs the averaged batch norm on the clients; use share 'without_batch_norm' "
                        "with method.without_batch_norm.mirror = true")
    if mirrored and not recipe.share.upload:
        raise UserError(f"{name}: without_batch_norm has nothing to mirror without its upload; set upload = true")
    plain = isinstance(norm, BatchNorm | IBN) or (isinstance(norm, MixIG) and norm.local == "bn")
    if isinstance(step, ClientAgnostic) and not isinstance(norm, BatchNorm | IBN | MixIG):
        raise UserError(f"{name}: client_agnostic makes its second pass by norm 'mix_ig', or by an insert on norm "
                        f"'batch_norm' or 'ibn'; {type(norm).__name__} would track both passes")
    if recipe.infer.swaps_batch_norm and not plain:
        raise UserError(f"{name}: {type(recipe.infer).__name__} changes batch-norm statistics at inference, but "
                        f"{type(norm).__name__} mixes its own; use norm 'batch_norm', 'ibn' or 'mix_ig'")
