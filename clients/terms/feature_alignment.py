"""CORAL and MMD: the features of every pair of domains in a batch get the same moments, or the same distribution."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction
from clients.tools.domains import DomainTerm, by_domain, several_domains
from fedsim.settings.tuned import Tuned

GAMMAS = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)  # of DomainBed's kernel


def covariance_distance(a: Tensor, b: Tensor) -> Tensor:
    """mean_jk (C_a - C_b)_jk^2 of features a [n, d] and b [m, d], with the unbiased covariances C [d, d]."""
    return (covariance(a) - covariance(b)).square().mean()


def covariance(features: Tensor) -> Tensor:
    """The unbiased covariance [d, d] of features [n, d], for n of at least 2."""
    centred = features - features.mean(0)
    return centred.T @ centred / (len(features) - 1)


def kernel_mean(x: Tensor, y: Tensor) -> Tensor:
    """The mean over all pairs of rows of x [n, d] and y [m, d] of sum_gamma exp(-gamma ||x_i - y_j||^2)."""
    squares = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
    distances = squares.clamp_min(1e-30)
    return torch.stack([(-gamma * distances).exp().mean() for gamma in GAMMAS]).sum()


class PairwiseAlignment(DomainTerm):
    """gamma times the mean of a distance over all pairs of domains of a batch."""

    gamma: float

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """The distance of features a [n, d] and b [m, d] of two domains, a scalar."""
        raise NotImplementedError

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The weighted mean distance, or None when gamma is 0 or the client has one domain."""
        if self.gamma == 0 or not several_domains(round):
            return None
        return lambda batch: self.gamma * mean_over_pairs(self.distance, self._features(round, batch), batch)

    def _features(self, round: LocalRound, batch: Batch) -> list[Tensor]:
        features = by_domain(round, batch, batch.features, 2)
        return [each.float() if each.dtype in (torch.bfloat16, torch.float16) else each for each in features]


def mean_over_pairs(distance: Callable[[Tensor, Tensor], Tensor], domains: list[Tensor], batch: Batch) -> Tensor:
    """The mean of the distance over all pairs of domains, a scalar; 0 where there are fewer than two."""
    if not domains:
        return batch.logits.new_zeros(())
    return torch.stack([distance(a, b) for a, b in itertools.combinations(domains, 2)]).mean()


@dataclass(frozen=True)
class CorrelationAlignment(PairwiseAlignment):
    """gamma times the mean over pairs of domains of mean_j (mu_a - mu_b)_j^2 + mean_jk (C_a - C_b)_jk^2.

    mu and C are the mean and the unbiased covariance of the features before the head, over a domain's examples in the
    batch. Source: Deep CORAL (Sun and Saenko, ECCV 2016), in the form of DomainBed for several sources (the default).
    `form = "paper"` has no means, and the covariance's part is divided by 4: ||C_a - C_b||_F^2 / (4 d^2). A domain with
    one example in a batch is left out of its pairs. A client with one domain adds nothing. `gamma = 0` gives FedAvg,
    with the batches `equal_domains`.

    FedDG_Benchmark's released code (da58f76) trains CORAL as empirical risk minimization: the `else` of its loop over
    pairs always runs and sets the penalty to 0.

    gamma: the weight of the distance
    form: DomainBed's distance of means and covariances, or the paper's of covariances
    """

    signed_loss: ClassVar[bool] = False

    gamma: Annotated[float, Field(ge=0), Tuned("log:0.1:10", "DomainBed")] = 1.0
    form: Literal["domainbed", "paper"] = "domainbed"

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """The distance of the moments."""
        if self.form == "paper":
            return covariance_distance(a, b) / 4
        return (a.mean(0) - b.mean(0)).square().mean() + covariance_distance(a, b)


@dataclass(frozen=True)
class MeanDiscrepancy(PairwiseAlignment):
    """gamma times the mean over pairs of domains of K_aa + K_bb - 2 K_ab, the squared maximum mean discrepancy.

    K_ab is the mean over all pairs of examples, each with itself too, of k(x, y) = sum_gamma' exp(-gamma' ||x - y||^2)
    with gamma' in {1e-3, 1e-2, ..., 1e3}. x and y are features before the head. Source: MMD (Li et al., CVPR 2018:
    MMD-AAE), in the form of DomainBed, which has neither the autoencoder nor the adversary of that paper. A domain with
    one example in a batch is left out of its pairs. A client with one domain adds nothing. `gamma = 0` gives FedAvg,
    with the batches `equal_domains`.

    FedDG_Benchmark's released code (da58f76) trains MMD as empirical risk minimization: the `else` of its loop over
    pairs always runs and sets the penalty to 0.

    gamma: the weight of the distance
    """

    gamma: Annotated[float, Field(ge=0), Tuned("log:0.1:10", "DomainBed")] = 1.0

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """The squared maximum mean discrepancy."""
        return kernel_mean(a, a) + kernel_mean(b, b) - 2 * kernel_mean(a, b)
