"""SiloBN's share rule: batch-norm statistics stay on the client."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from fedsim.tensors.kinds import Kind, tensor_kinds
from strategies.parts import Place, Share

if TYPE_CHECKING:
    from fedsim.methods.recipe import Recipe


@dataclass(frozen=True)
class WithoutStatistics(Share):
    """Batch-norm statistics and counters stay on the client; the affine part is shared (SiloBN, Andreux et al. 2020).

    With `upload` the statistics are also averaged for the unseen domain (inductive). Without it they never leave the
    client, and the unseen domain needs `infer = "recompute"` (transductive).
    """

    upload: bool = True

    def refuses(self, recipe: "Recipe") -> str:
        """An unseen domain needs a model."""
        if self.upload or recipe.infer.replaces_statistics:
            return ""
        return (
            "without the upload of statistics no model for the unseen domain exists unless the inference rule computes "
            "all of them again; keep upload = true, or set method.infer = 'recompute'"
        )

    def place(self, net: nn.Module) -> dict[str, Place]:
        """Running mean, variance and counters are `upload` (or `local`), all others `shared`."""
        kept: Place = "upload" if self.upload else "local"
        statistics = (Kind.BN_STATISTICS, Kind.COUNTER)
        return {name: kept if kind in statistics else "shared" for name, kind in tensor_kinds(net).items()}
