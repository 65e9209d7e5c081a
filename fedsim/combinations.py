"""Which parts make no sense together; refused in one line when the experiment is read."""

from clients.step.client_agnostic import ClientAgnostic
from fedsim.errors import UserError
from fedsim.models.norms import IBN, XAN, BatchNorm, MixIG
from fedsim.recipe import Recipe, part_name
from strategies.share.everything import Everything
from strategies.weights.by_examples import ByExamples
from strategies.weights.uniform import Uniform


def check_recipe(recipe: Recipe, name: str) -> None:
    """Refuse combinations that make no sense, in one line."""
    if not recipe.fuse.uses_weights and not isinstance(recipe.weights, ByExamples | Uniform):
        raise UserError(
            f"{name}: {part_name(recipe.fuse)} weighs every tensor by itself, so {part_name(recipe.weights)} "
            "would have no effect; use one of the two"
        )
    scope = getattr(recipe.share, "scope", "all")
    if scope == "xan" and not isinstance(recipe.norm, XAN):
        raise UserError(f"{name}: without_batch_norm with scope 'xan' needs norm 'xan', not {part_name(recipe.norm)!r}")
    _check_batch_norm(recipe, name)
    contributors, banks = recipe.contributors(), {bank.name: bank for bank in recipe.banks}
    for bank in contributors.keys() - banks.keys():
        raise UserError(f"{name}: {part_name(contributors[bank])} needs the bank {bank!r}; add it to method.banks")
    for bank in banks.keys() - contributors.keys():
        raise UserError(f"{name}: no part contributes to {part_name(banks[bank])}; take it out of method.banks")
    if not getattr(recipe.share, "upload", True) and not recipe.infer.transductive:
        raise UserError(
            f"{name}: without the upload of batch norm no model for the unseen domain exists; keep upload = "
            "true, or re-estimate the statistics there with method.infer = 'recompute'"
        )
    if recipe.pooled and (recipe.banks or recipe.client.prelude or not isinstance(recipe.share, Everything)):
        raise UserError(
            f"{name}: all source data are pooled on one client, so parts that exchange something between "
            "clients have no meaning; use a federated method"
        )


def _check_batch_norm(recipe: Recipe, name: str) -> None:
    """Parts that act on batch-norm layers need layers that they can act on, and their global averages."""
    norm, step = recipe.norm, recipe.client
    mirrored = getattr(recipe.share, "mirror", False)
    if isinstance(step, ClientAgnostic) and isinstance(norm, MixIG) and not mirrored:
        raise UserError(
            f"{name}: mix_ig needs the averaged batch norm on the clients; use share 'without_batch_norm' "
            "with method.without_batch_norm.mirror = true"
        )
    if mirrored and not recipe.share.upload:
        raise UserError(f"{name}: without_batch_norm has nothing to mirror without its upload; set upload = true")
    plain = isinstance(norm, BatchNorm | IBN) or (isinstance(norm, MixIG) and norm.local == "bn")
    if isinstance(step, ClientAgnostic) and not isinstance(norm, BatchNorm | IBN | MixIG):
        raise UserError(
            f"{name}: client_agnostic makes its second pass by norm 'mix_ig', or by an insert on norm "
            f"'batch_norm' or 'ibn'; {type(norm).__name__} would track both passes"
        )
    if recipe.infer.swaps_batch_norm and not plain:
        raise UserError(
            f"{name}: {type(recipe.infer).__name__} changes batch-norm statistics at inference, but "
            f"{type(norm).__name__} mixes its own; use norm 'batch_norm', 'ibn' or 'mix_ig'"
        )
