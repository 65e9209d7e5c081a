"""SiloBN's share rule: batch-norm statistics stay on the client."""

from dataclasses import dataclass

from fedsim.models.net import Net
from fedsim.parts.facts import Fact, Facts
from fedsim.tensors.kinds import Kind, tensor_kinds
from strategies.parts import Place, Share


@dataclass(frozen=True)
class WithoutStatistics(Share):
    """Batch-norm statistics and counters stay on the client; the affine part is shared (SiloBN, Andreux et al. 2020).

        client k:       theta <- sum_j p_j theta_j next to its own statistics s_k
        unseen domain:  the same theta with s = sum_j p_j s_j

    upload: the statistics are also averaged for the unseen domain (inductive). Without it they never leave the client,
    and the unseen domain needs `infer = "recompute"` (transductive)
    """

    upload: bool = True

    @property
    def assumes(self) -> Facts:
        """Without the upload an unseen domain has no statistics unless they are computed on it."""
        return (*super().assumes, *(() if self.upload else (Fact.TARGET_STATISTICS,)))

    def place(self, net: Net) -> dict[str, Place]:
        """Running mean, variance and counters are `upload` (or `local`), all others `shared`."""
        place: Place = "upload" if self.upload else "local"
        statistics = (Kind.BN_STATISTICS, Kind.COUNTER)
        return {name: place if kind in statistics else "shared" for name, kind in tensor_kinds(net).items()}
