"""XAN: the explicit mixture of instance norm and batch norm of gPerXAN."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.net import Net
from fedsim.models.norms.base import Norm
from fedsim.models.norms.branches import by_branches, suits_branches
from fedsim.models.norms.instance_norm import InstanceNorm2d
from fedsim.models.norms.moments import Moments, tracked_affine
from fedsim.models.norms.placement import batch_norm_paths, replace
from fedsim.settings.effect import Only, Trait
from fedsim.tensors.kinds import Kind


class XANLayer(nn.Module):
    """y = w_in IN(h) + w_bn BN(h), each branch with its own affine parameters (gPerXAN, eq. 1).

        mix="softmax": (w_bn, w_in) = softmax(s_bn, s_in), both scores start at 1 (the released code)
        mix="free":    w_bn = s_bn and w_in = s_in, both start at 0.5 (the paper's equation; it draws them at random)

    IN has the biased variance over H*W and no running statistics. BN is the replaced layer itself, so that it keeps the
    pretrained affine parameters and statistics. On a one-pixel map IN gives its beta. Plain BN is the limit s_bn - s_in
    -> infinity.

    gPerXAN keeps the tensors of the BN branch (`bn.*`, `s_bn`) on the client; `bn_scope(model, "xan")` lists them.
    """

    tensor_kinds: ClassVar[dict[str, Kind]] = {"s_bn": Kind.BN_AFFINE, "s_in": Kind.WEIGHT}
    bn_group: ClassVar[str] = "xan"

    def __init__(self, bn: nn.BatchNorm2d, mix: str = "softmax", in_init: str = "ones") -> None:
        super().__init__()
        self.bn = bn
        self.inorm = InstanceNorm2d(bn.num_features, bn.eps).to(bn.weight.device)
        score = 1.0 if mix == "softmax" else 0.5
        self.s_bn = nn.Parameter(torch.tensor(score, device=bn.weight.device))
        self.s_in = nn.Parameter(torch.tensor(score, device=bn.weight.device))
        self.mix = mix
        if in_init == "copy_bn":
            self.inorm.load_state_dict({"weight": bn.weight, "bias": bn.bias})

    def _weights(self, s_bn: Tensor, s_in: Tensor) -> tuple[Tensor, Tensor]:
        if self.mix == "free":
            return s_bn, s_in
        w_bn = torch.sigmoid(s_bn - s_in)  # equals the softmax of two scores
        return w_bn, 1 - w_bn

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape. Raises ValueError for a training batch with one value per channel."""
        if suits_branches(x):
            return self.by_branches(x)

        def rule(mean: Tensor, variance: Tensor, batch: Moments, *own: Tensor) -> tuple[Tensor, Tensor]:
            (batch_mean, batch_variance), (gamma_bn, beta_bn, gamma_in, beta_in, s_bn, s_in) = batch, own
            w_bn, w_in = self._weights(s_bn, s_in)
            a_bn = w_bn * gamma_bn * torch.rsqrt(batch_variance + self.bn.eps)
            a_in = w_in * gamma_in * torch.rsqrt(variance + self.inorm.eps)
            return a_bn + a_in, a_bn * (mean - batch_mean) + w_bn * beta_bn + w_in * beta_in

        bn, inorm = self.bn, self.inorm
        return tracked_affine(x, bn, rule, bn.weight, bn.bias, inorm.weight, inorm.bias, self.s_bn, self.s_in)

    def by_branches(self, x: Tensor) -> Tensor:
        """The sum of both branches, whose weights are in their affine maps.

        It has a sixth of the formula's operations, each of which a GPU starts anew. On a CPU it takes longer.
        """
        bn, inorm = self.bn, self.inorm
        scores = torch.stack((self.s_bn, self.s_in))
        weights = torch.softmax(scores, 0) if self.mix == "softmax" else scores
        affine = torch.stack((bn.weight, bn.bias, inorm.weight, inorm.bias)).unflatten(0, (2, 2))
        weight_bn, bias_bn, weight_in, bias_in = (affine * weights[:, None, None]).flatten(0, 1).unbind()
        return by_branches(x, bn, (weight_bn, bias_bn), (weight_in, bias_in), inorm.eps)

    def extra_repr(self) -> str:
        """Shown by print(net)."""
        return f"mix={self.mix}"


@dataclass(frozen=True)
class XAN(Norm):
    """Replaces batch-norm layers by XAN layers.

    Source: gPerXAN (Le et al., CVPR 2024), section 3.1 and equation 1. Where paper and released code differ, a setting
    says so. On PACS the paper replaces all norms of ResNet-50 (53), on Office-Home the stem and stages 1 and 2 (24),
    and on Camelyon17 dense block 1 and the transition after it (13), without the stem. A "block" of the paper is a
    stage: its checkpoint with four blocks replaces all. On digits-cnn-bn both norms are in stage 1. `norm =
    "batch_norm"` gives FedAvg's network.

    stages: the stages in which norms are replaced, those of shortcuts included (1 is layer1, or denseblock1 and its
    transition)
    stem: replace the norm before stage 1 too (bn1, norm0), as the released code does
    mix: "softmax" of two scores that both start at 1 (code, default), so that each branch has the weight 0.5; or "free"
    weights (paper), which both start at 0.5 here and are drawn at random in the paper
    in_init: "ones" starts IN at gamma 1 and beta 0 (paper), "copy_bn" at the pretrained affine parameters of BN
    """

    stages: tuple[int, ...] = (1, 2, 3, 4)
    stem: Annotated[bool, Only(Trait.STEM)] = True
    mix: Literal["softmax", "free"] = "softmax"
    in_init: Literal["ones", "copy_bn"] = "ones"

    def apply(self, net: Net) -> None:
        """Replaces the layers in place. Raises UserError when the stages have no batch norm."""
        paths = batch_norm_paths(net, self.stages, self.stem)
        if not paths:
            raise UserError(f"norm XAN: stages {list(self.stages)} hold no batch norm; known: {sorted(net.stages)}")
        replace(net, paths, lambda bn: XANLayer(bn, self.mix, self.in_init))
