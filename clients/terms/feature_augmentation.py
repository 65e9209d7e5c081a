"""Simple feature augmentation: the classifier is also trained on features with Gaussian noise."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Above, Only
from fedsim.settings.tuned import DECADE, Tuned

MOMENTS = "class-moments"  # the store's entry: count, sum and sum of outer products of each class's features
FOLD_FROM = 4096  # so many rows are remembered before they are added to the sums
RIDGE = 1e-4  # this share of the mean variance is added to the diagonal: a covariance of few samples then has a root


@dataclass(frozen=True)
class FeatureAugmentation(Term):
    """lam CE(h(z'), y), where z' = a * z + b and a ~ N(1, sigma1^2 I) for every sample and feature:

        variant "s" (SFA-S):  b ~ N(0, sigma2^2 I)
        variant "a" (SFA-A):  b ~ N(0, nu Sigma_y), where Sigma_y is the covariance of the client's features of class y

    Source: SFA (Li et al., ICCV 2021), known to us from its abstract. No official code is known, so sigma1, sigma2, nu
    and lam are our choice. Gradients reach the features and the classifier. Sigma_y is computed from the features of
    the client's earlier rounds, and never leaves the client. The abstract says that it is estimated iteratively during
    training, and not over which iterations: `estimate` has both readings. It stays the same within a round. In the
    first `warmup` rounds, and for classes with fewer than two images, b is 0. The noise is used only in training.
    `lam = 0` gives FedAvg.

    variant: what b is, "s" or "a" as above
    sigma1, sigma2: the standard deviations of a and b
    nu: the scale of the covariance
    lam: the weight of the term
    warmup: the number of first rounds with b = 0
    estimate: the features of which Sigma_y is the covariance: of the client's last `round`, whose features belong to a
    recent model, or of `all` of its rounds so far, where every pass over an image counts alike
    """

    side_by_side: ClassVar[bool] = True

    variant: Literal["s", "a"] = "s"
    sigma1: Annotated[float, Field(ge=0), Only(lam=Above(0))] = 0.5
    sigma2: Annotated[float, Field(ge=0), Only(variant="s", lam=Above(0))] = 0.5
    nu: Annotated[float, Field(ge=0), Only(variant="a", lam=Above(0))] = 1.0
    lam: Annotated[float, Field(ge=0), Tuned("log:0.1:10", DECADE)] = 1.0
    warmup: Annotated[int, Field(ge=1), Only(variant="a", lam=Above(0))] = 1

    estimate: Annotated[Literal["round", "all"], Only(variant="a", lam=Above(0))] = "round"

    @property
    def assumes(self) -> tuple[Fact, ...]:
        """The covariances are those of classes."""
        return (Fact.HARD_LABELS,) if self.variant == "a" else ()

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The cross-entropy with noise, or None when lam is 0."""
        if self.lam == 0:
            return None
        roots = self._roots(round) if self.variant == "a" else None
        moments = round.scratch[MOMENTS] = ClassMoments(round.classes)

        def draw(batch: Batch) -> tuple[Tensor, Tensor | float]:
            z = batch.features
            if self.variant == "a":
                moments.add(z.detach().float().clone(), batch.labels)  # the next pass may write over z
            return torch.normal(1.0, self.sigma1, z.shape, device=z.device), self._shift(batch, roots)

        def term(batch: Batch) -> Tensor:
            a, b = batch.once(self, lambda: draw(batch))
            noisy = batch.features * a + b
            with round.autocast():
                logits = round.net.head(noisy.to(batch.features.dtype))
            return self.lam * F.cross_entropy(logits.float(), batch.truth)

        return term

    def end(self, round: LocalRound) -> None:
        """Stores the moments of the features. A class that did not occur in the round keeps those of an earlier one."""
        if self.variant == "s" or MOMENTS not in round.scratch or not round.steps:
            return
        moments: ClassMoments = round.scratch[MOMENTS]
        earlier = round.store.get(MOMENTS)
        round.store.put(MOMENTS, moments.added(earlier) if self.estimate == "all" else moments.merged(earlier))

    def _shift(self, batch: Batch, roots: Tensor | None) -> Tensor | float:
        """b, of shape [B, D]."""
        z = batch.features
        if self.variant == "s":
            return torch.normal(0.0, self.sigma2, z.shape, device=z.device)
        if roots is None:
            return 0.0
        draws = torch.randn(z.shape, device=z.device)
        of_all_classes = roots @ draws.T  # [classes, D, B]: cheaper than a root for every row
        rows = torch.arange(len(z), device=z.device)
        return self.nu**0.5 * of_all_classes[batch.labels, :, rows]

    def _roots(self, round: LocalRound) -> Tensor | None:
        """Lower triangular L_y with L_y L_y^T = Sigma_y, of shape [classes, D, D], or None in a warm-up round."""
        stored = round.store.get(MOMENTS)
        if stored is None or round.round <= self.warmup:
            return None
        return covariance_roots(stored["count"], stored["sum"], stored["square"]).to(round.device)


def covariance_roots(count: Tensor, total: Tensor, square: Tensor) -> Tensor:
    """Cholesky roots [C, D, D] of the classes' population covariances; 0 for classes with fewer than two rows.

    count [C], total [C, D] and square [C, D, D] are the number, the sum and the sum of outer products of the rows, in
    float64.
    """
    many = count.clamp_min(1)[:, None]
    mean = total / many
    covariance = square / many[..., None] - mean[:, :, None] * mean[:, None, :]
    scale = covariance.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
    covariance = covariance + RIDGE * torch.diag_embed(scale[:, None].expand_as(mean))
    roots, failed = torch.linalg.cholesky_ex(covariance)
    usable = (count >= 2) & (failed == 0)
    return torch.where(usable[:, None, None], roots, 0.0).float()


class ClassMoments:
    """Count, sum and sum of outer products of the features of each class. Rows are added a few thousand at a time."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.sums: dict[str, Tensor] = {}

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Remembers the rows of a batch."""
        self.rows.append((features, labels))
        if sum(len(labels) for _, labels in self.rows) >= FOLD_FROM:
            self.fold()

    def fold(self) -> None:
        """Adds the remembered rows to the sums."""
        if not self.rows:
            return
        features, labels = (torch.cat(values) for values in zip(*self.rows))
        features, self.rows = features.double().cpu(), []
        by_class = [features[(labels == index).cpu()] for index in range(self.classes)]
        new = {
            "count": torch.tensor([float(len(rows)) for rows in by_class], dtype=torch.float64),
            "sum": torch.stack([rows.sum(0) for rows in by_class]),
            "square": torch.stack([rows.T @ rows for rows in by_class]),
        }
        self.sums = {name: self.sums.get(name, 0) + value for name, value in new.items()}

    def merged(self, earlier: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """These moments, with the earlier moments of the classes that have no rows here."""
        self.fold()
        if earlier is None:
            return self.sums
        seen = self.sums["count"] > 0
        shapes = {"count": seen, "sum": seen[:, None], "square": seen[:, None, None]}
        return {name: torch.where(shapes[name], value, earlier[name]) for name, value in self.sums.items()}

    def added(self, earlier: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The sums of these moments and the earlier ones."""
        self.fold()
        if earlier is None:
            return self.sums
        return {name: value + earlier[name] for name, value in self.sums.items()}
