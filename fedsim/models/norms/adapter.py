"""FedIG-A's adapter: from an image's distance to the global statistics to the share of its own ones."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Adapter(nn.Module):
    """Linear(2C, h) - ReLU - Linear(h, 2): from the distance of instance statistics to the global ones to (delta, eps).

    The paper does not give the initial values, and the clamp of alpha has no gradient outside [0, 1]. Therefore the
    last layer starts as N(0, 0.01^2) with delta 0.1 and eps 0.25, so that training starts inside this range. The
    distances of a client's own images are small and centred, so that the bias of a hidden unit decides whether its ReLU
    is ever active. The biases of the first layer start at 1, because with PyTorch's usual draw half of the units would
    be inactive for every image.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2 * channels, hidden)
        self.fc2 = nn.Linear(hidden, 2)
        nn.init.normal_(self.fc2.weight, std=0.01)
        with torch.no_grad():
            self.fc1.bias.fill_(1.0)
            self.fc2.bias.copy_(torch.tensor([0.1, 0.25]))

    @staticmethod
    def alpha(shift: Tensor, z: Tensor | None, *weights: Tensor) -> Tensor:
        """clamp(delta z + eps, 0, 1) [B, 1] of the distance [B, 2C]; without z (at inference) clamp(eps, 0, 1)."""
        return Adapter.passed(shift, z, *weights)[1].clamp(0, 1)

    @staticmethod
    def passed(shift: Tensor, z: Tensor | None, *weights: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden units [B, h], and delta z + eps [B, 1] before the clamp; without z eps alone."""
        hidden = F.relu(F.linear(shift, *weights[:2]))
        delta, eps = F.linear(hidden, *weights[2:]).chunk(2, dim=1)
        return hidden, eps if z is None else delta * z[:, None] + eps

    @staticmethod
    def gradients(
        grad: Tensor, shift: Tensor, z: Tensor, passed: Sequence[Tensor], *weights: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradients of the distance [B, 2C] and of the four weights, from that of alpha [B, 1].

        passed: the hidden units [B, h], delta z + eps [B, 1], and alpha [B, 1], which is that clamped to [0, 1]

        For hidden units h = max(W1 s + b1, 0) and outputs (delta, eps) = W2 h + b2 of an image:

            p = dL/d(delta z + eps) = dL/dalpha where that is inside [0, 1], else 0
            o = p (z, 1),       dL/dW2 = sum_i o h^T,   dL/db2 = sum_i o
            k = W2^T o where h > 0, else 0,   dL/dW1 = sum_i k s^T,   dL/db1 = sum_i k,   dL/ds = W1^T k
        """
        hidden, before, alpha = passed
        inside = grad * (before == alpha)
        of_outputs = torch.cat((inside * z[:, None], inside), dim=1)
        of_hidden = torch.ops.aten.threshold_backward(of_outputs @ weights[2], hidden, 0)
        first = of_hidden.T @ shift, of_hidden.sum(dim=0)
        second = of_outputs.T @ hidden, of_outputs.sum(dim=0)
        return of_hidden @ weights[0], (*first, *second)

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors that `alpha` takes."""
        return self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
