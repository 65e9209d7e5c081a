"""FedADG's networks besides the main one: a generator of features by label, a discriminator of features, their losses.

h [B, d] are extracted features, h' [B, d] generated ones, e(y) [B, C] label codes.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Projection = Literal["frozen", "trained", "kaiming"]


def label_code(labels: Tensor, classes: int, s: float) -> Tensor:
    """e(y) = s onehot(y), float [B, C]."""
    return s * F.one_hot(labels, classes).float()


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smooth: float) -> Tensor:
    """Mean cross-entropy with the target 1 - smooth for the label and smooth / (C - 1) for each other class."""
    if smooth == 0:
        return F.cross_entropy(logits, labels)
    log_p = torch.log_softmax(logits, dim=1)
    of_label = log_p.gather(1, labels[:, None])[:, 0]
    others = (log_p.sum(dim=1) - of_label) / (logits.shape[1] - 1)
    return -((1 - smooth) * of_label + smooth * others).mean()


def discriminator_loss(extracted: Tensor, generated: Tensor, kind: str = "ls") -> Tensor:
    """L_d of the scores D(h) and D(h'); a score of 1 means generated.

    "ls":   mean[(1 - D(h'))^2 + D(h)^2]
    "max":  -mean (1 - D(h))^2 - mean D(h')^2 (the paper)
    """
    if kind == "ls":
        return (1 - generated).square().mean() + extracted.square().mean()
    return -(1 - extracted).square().mean() - generated.square().mean()


def feature_loss(extracted: Tensor) -> Tensor:
    """L_f = mean (1 - D(h))^2: features should look generated."""
    return (1 - extracted).square().mean()


def generator_loss(generated: Tensor, kind: str = "pull") -> Tensor:
    """L_g: "pull" is mean D(h')^2, towards the features; "paper" is mean (1 - D(h'))^2, away from them."""
    return generated.square().mean() if kind == "pull" else (1 - generated).square().mean()


class Undrawn(nn.Linear):
    """A linear layer whose values are loaded next, so that none are drawn: G has millions of them."""

    def reset_parameters(self) -> None:
        """Leaves the memory as it is."""


class Generator(nn.Module):
    """h' = G([z, e(y)]): Linear(d_noise + C, width) - LeakyReLU - Linear(width, d), and a ReLU where features have one.

    Weights are Xavier-uniform with gain 0.5, unless `linear` is `Undrawn`.
    """

    def __init__(
        self, d_noise: int, classes: int, width: int, features: int, nonnegative: bool,
        linear: type[nn.Linear] = nn.Linear,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden = linear(d_noise + classes, width)
        self.out = linear(width, features)
        self.nonnegative = nonnegative
        for layer in (self.hidden, self.out) if linear is not Undrawn else ():
            nn.init.xavier_uniform_(layer.weight, gain=0.5)

    def forward(self, z: Tensor, code: Tensor) -> Tensor:
        """Noise [B, d_noise] and codes [B, C] to features [B, d]."""
        features = self.out(F.leaky_relu(self.hidden(torch.cat([z, code], dim=1))))
        return F.relu(features) if self.nonnegative else features


class Discriminator(nn.Module):
    """D(h, y) = sigmoid(MLP([P h, e(y)])) in (0, 1): Linear(r + C, hidden) - LeakyReLU - Linear(hidden, 1).

    P [r, d] is random with ||P||_F = 1 and is not trained. `projection` "trained" trains it with the rest; "kaiming"
    starts from Kaiming-uniform values in place of norm 1, and trains it. `label_first` is MLP(P [h, e(y)]).
    """

    def __init__(
        self, features: int, classes: int, r: int, hidden: int, projection: Projection = "frozen",
        label_first: bool = False, linear: type[nn.Linear] = nn.Linear,
    ) -> None:  # fmt: skip
        super().__init__()
        self.label_first = label_first
        p = torch.randn(r, features + classes * label_first)
        p = nn.init.kaiming_uniform_(p) if projection == "kaiming" else p / p.norm()
        if projection == "frozen":
            self.register_buffer("projection", p)
        else:
            self.projection = nn.Parameter(p)
        self.hidden = linear(r + classes * (not label_first), hidden)
        self.out = linear(hidden, 1)

    def forward(self, features: Tensor, code: Tensor) -> Tensor:
        """Scores [B] of features [B, d] with codes [B, C]."""
        inside = torch.cat([features, code], dim=1) if self.label_first else features
        projected = F.linear(inside, self.projection)
        joint = projected if self.label_first else torch.cat([projected, code], dim=1)
        return torch.sigmoid(self.out(F.leaky_relu(self.hidden(joint))).float())[:, 0]
