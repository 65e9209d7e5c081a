"""Networks and losses of adversarial adaptation with disentangled features (FADA), without clients and rounds."""

import copy
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.optimizers import eager
from fedsim.common.errors import UserError

FEATURES = "target_features"  # the record of the server's bank, and its tensor
HIDDEN = 256  # hidden units of the domain identifier
STATISTIC = 512  # hidden units of the statistic network
SLOPE = 0.2


class Statistic(nn.Module):
    """MINE's statistic network T(p, q): two linear layers, their sum, a LeakyReLU, and one number per pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, STATISTIC), nn.Linear(width, STATISTIC)
        self.out = nn.Linear(STATISTIC, 1)

    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        """p and q [B, width] to [B]."""
        return self.out(F.leaky_relu(self.left(p) + self.right(q), SLOPE)).squeeze(1)


def identifier(width: int) -> nn.Sequential:
    """The domain identifier: features [B, width] to the logit [B, 1] of "source"."""
    return nn.Sequential(nn.Linear(width, HIDDEN), nn.LeakyReLU(SLOPE), nn.Linear(HIDDEN, 1))


def input_width(bottleneck: nn.Module) -> int:
    """The number of features that a bottleneck takes; 0 where it has no linear layer."""
    return next((module.in_features for module in bottleneck.modules() if isinstance(module, nn.Linear)), 0)


def auxiliary_networks(bottleneck: nn.Module, width: int, classes: int, di_width: int) -> nn.ModuleDict:
    """The networks that belong to one source client, with random initial weights from torch's generator.

    They are `specific` (D_ds, built like the bottleneck D_di), `classes` (CI), `rebuild` (R), `statistic` (M), and
    `domain` (DI).
    """
    specific = copy.deepcopy(bottleneck)
    for module in specific.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return nn.ModuleDict(
        {
            "specific": specific,
            "classes": nn.Linear(width, classes),
            "rebuild": nn.Linear(2 * width, input_width(bottleneck)),
            "statistic": Statistic(width),
            "domain": identifier(di_width),
        }
    )


def domain_loss(source: Tensor, target: Tensor) -> Tensor:
    """-E log DI(source) - E log(1 - DI(target)); both are logits of "source"."""
    return F.softplus(-source).mean() + F.softplus(target).mean()


def source_loss(logits: Tensor) -> Tensor:
    """-E log DI(x): the features should look as if they came from the source."""
    return F.softplus(-logits).mean()


def confusion_loss(logits: Tensor) -> Tensor:
    """-(1 / (n C)) sum log CI_c: cross-entropy from the uniform distribution; log C for equal probabilities."""
    return -logits.log_softmax(dim=1).mean()


def information(joint: Tensor, marginal: Tensor) -> Tensor:
    """The Donsker-Varadhan bound on mutual information: mean T(p, q) - log mean exp T(p, q'); it may be negative."""
    return joint.mean() - (torch.logsumexp(marginal, 0) - np.log(len(marginal)))


def tightness(features: Tensor, clusters: np.ndarray, squared: bool = False) -> float:
    """Gap statistic I = sum_r 1/(2 n_r) sum_{i,j in r} ||f_i - f_j|| over all ordered pairs inside clusters.

    features [m, d], clusters [m]. Squared distances give the within-cluster sum of squares. 0 for single points.
    """
    total = 0.0
    for number in np.unique(clusters):
        members = features[torch.from_numpy(clusters == number)].double()
        distances = torch.cdist(members, members, compute_mode="donot_use_mm_for_euclid_dist")
        total += float((distances.square() if squared else distances).sum()) / (2 * len(members))
    return total


def clustered(features: Tensor, count: int, seed: int) -> np.ndarray:
    """Clusters [m] of k-means (k-means++, 10 restarts) with k = min(count, m)."""
    from sklearn.cluster import KMeans  # slow to import, and only the target's client needs it

    points = features.double().cpu().numpy()
    distinct = len(np.unique(points, axis=0))
    return KMeans(min(count, distinct), n_init=10, random_state=seed).fit(points).labels_


def make_adam(modules: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Adam over the trainable parameters; each parameter's moments count only the steps that changed it.

    Raises UserError when all of them are frozen (`model.train`), because FADA is about training them.
    """
    trained = [value for value in modules.parameters() if value.requires_grad]
    if not trained:
        raise UserError("FADA has nothing to train here, because model.train freezes all of it; use 'all'")
    return eager(torch.optim.Adam)(trained, lr, weight_decay=weight_decay)


def advance(loss: Tensor, *groups: tuple[torch.optim.Optimizer, Sequence[nn.Module]]) -> Tensor:
    """One step of each optimizer on one loss, for its own modules' parameters alone; the loss without its graph."""
    owned = [(optimizer, [value for module in modules for value in module.parameters() if value.requires_grad])
             for optimizer, modules in groups]  # fmt: skip
    everything = [value for _, parameters in owned for value in parameters]
    if not everything:  # all parameters are frozen
        return loss.detach()
    gradients = torch.autograd.grad(loss, everything, allow_unused=True)
    for optimizer, _ in owned:
        optimizer.zero_grad(set_to_none=True)
    for parameter, gradient in zip(everything, gradients, strict=True):
        parameter.grad = gradient
    for optimizer, parameters in owned:
        if parameters:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()
