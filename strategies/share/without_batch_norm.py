"""Share rules: which tensors leave the client. Batch norm is found by module type, never by a name."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from fedsim.arrays import bn_scope
from fedsim.models.norms.xan import XAN, XANLayer
from strategies.parts import NO_MODEL, Place, Share

if TYPE_CHECKING:
    from fedsim.recipe import Recipe


@dataclass(frozen=True)
class WithoutBatchNorm(Share):
    """Batch norm (affine, statistics, counters) stays on its client, the rest is shared.

    FedBN (Li et al., ICLR 2021) with `scope="all"`; gPerXAN (CVPR 2024) with `scope="xan"`, where batch norm outside
    the XAN layers is shared like any layer. The original FedBN has no model for an unseen domain: with `upload`
    the batch-norm side is also sent up and averaged into the evaluation model, and still never loaded by a client
    (`avg_bn`, the convention behind the papers' tables). `scope="none"` gives FedAvg; `share_scores` also shares the
    mixing score of XAN's batch-norm branch, which is personal by accident in gPerXAN's code (core.md 2.7).
    """

    scope: Literal["all", "xan", "none"] = "all"
    upload: bool = True
    share_scores: bool = False

    def refuses(self, recipe: "Recipe") -> str:
        """The scope must name layers that are there, and an unseen domain needs a model."""
        if self.scope == "xan" and not isinstance(recipe.norm, XAN):
            return f"without_batch_norm with scope 'xan' needs norm 'xan', not {type(recipe.norm).__name__}"
        return "" if self.upload or recipe.infer.transductive else NO_MODEL

    def place(self, net: nn.Module) -> dict[str, Place]:
        """Batch-norm entries in scope are `upload` (or `local`), all else `shared`."""
        places: dict[str, Place] = dict.fromkeys(net.state_dict(), "shared")
        if self.scope == "none":
            return places
        kept: Place = "upload" if self.upload else "local"
        places |= dict.fromkeys(bn_scope(net, self.scope), kept)
        if self.share_scores:
            places |= {f"{path}.s_bn": "shared" for path, module in net.named_modules() if isinstance(module, XANLayer)}
        return places
