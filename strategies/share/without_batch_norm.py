"""Share rules without batch norm, which is found by the type of a module and never by a name."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fedsim.models.net import Net
from fedsim.models.norms.base import Norm
from fedsim.models.norms.xan import XAN, XANLayer
from fedsim.parts.part import RecipeParts
from fedsim.settings.effect import Only, Trait
from fedsim.tensors.kinds import bn_scope
from strategies.parts import Place, Share


@dataclass(frozen=True)
class WithoutBatchNorm(Share):
    """Batch norm (affine part, statistics, counters) stays on its client; the rest is shared.

        client k:       theta <- sum_j p_j theta_j next to its own batch norm b_k
        unseen domain:  the same theta with b = sum_j p_j b_j

    Source: FedBN (Li et al., ICLR 2021) with `scope="all"`; gPerXAN (CVPR 2024) with `scope="xan"`, where batch norm
    outside the XAN layers is shared like any layer. The original FedBN has no model for an unseen domain.
    `scope="none"` gives FedAvg.

    scope: "all" batch norm of the network, that of the "xan" layers alone, or "none"
    upload: the batch norm is also sent to the server and averaged into the evaluation model. A client never loads this
    average (`avg_bn`, the convention behind the tables of the papers). It is that of the clients of the round, unless
    the refining part `upload_cache` keeps the last batch norm of the others. Without the upload the unseen domain's
    model would have the batch norm of the untrained network, so that this is refused
    share_scores: also shares the mixing score of XAN's batch-norm branch, which gPerXAN's code keeps by accident
    """

    scope: Literal["all", "xan", "none"] = "all"
    upload: bool = True
    share_scores: Annotated[bool, Only(Trait.XAN)] = False

    def refuses(self, recipe: RecipeParts) -> str:
        """The scope must name layers that exist, and an unseen domain needs a model."""
        if self.scope == "xan" and not recipe.of(XAN):
            return f"without_batch_norm with scope 'xan' needs norm 'xan', not {type(recipe.of(Norm)[0]).__name__}"
        if self.upload or self.scope == "none":
            return ""
        return (
            "without the upload of batch norm no model for the unseen domain exists, because no inference rule "
            "computes gamma and beta again; keep upload = true, or set method.share = 'without_statistics'"
        )

    def place(self, net: Net) -> dict[str, Place]:
        """Batch-norm entries in scope are `upload` (or `local`), all others `shared`."""
        places: dict[str, Place] = dict.fromkeys(net.state_dict(), "shared")
        if self.scope == "none":
            return places
        place: Place = "upload" if self.upload else "local"
        places |= dict.fromkeys(bn_scope(net, self.scope), place)
        if self.share_scores:
            places |= {f"{path}.s_bn": "shared" for path, module in net.named_modules() if isinstance(module, XANLayer)}
        return places
