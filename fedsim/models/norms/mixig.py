"""MixIG: batch norm that can also normalize by mixtures of instance and global statistics, drawn or learned."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.models.net import Net
from fedsim.models.norms.adapter import Adapter
from fedsim.models.norms.base import Norm
from fedsim.models.norms.bin import BINLayer
from fedsim.models.norms.instance import has_positions, instance_moments, normalize_by
from fedsim.models.norms.mixture import SMALLEST_STD, Mixture
from fedsim.models.norms.moments import BatchNormLayer, running
from fedsim.models.norms.placement import batch_norm_paths, replace
from fedsim.parts.facts import Fact, Facts
from fedsim.settings.effect import Only

Mode = Literal["local", "mixed", "adapted"]
NARROWEST = 4  # smallest number of an adapter's hidden units: that of ResNet-18's stem, the paper's narrowest layer


class MixIGLayer(nn.Module):
    """The client's own norm layer `bn`, with the global statistics next to it (FedIG and FedIG-A).

        mode "local" (standard): y = bn(x), in train or eval mode as any batch norm
        mode "mixed" (pass 2):   mu = u mu_i + (1 - u) mu_G,  sigma = max(u sigma_i + (1 - u) sigma_G, 1e-3),
                                 y = gamma (x - mu) / sigma + beta;  the batch, mu and sigma share u [C]
        mode "adapted":          the same with alpha in place of u, one number per sample from the adapter;
                                 in training (pass 3) alpha is drawn by z, in eval mode it is clamp(eps, 0, 1)

    mu_i and sigma_i are the mean and sqrt(biased variance + eps) of each sample. In training, mu_G and sigma_G are what
    `install_global` put into the buffers `global_*`, which are not part of the state. In eval mode, on the aggregated
    model, they are the running statistics of `bn`. Only the mode "local" changes running statistics. Where instance
    statistics do not exist (BatchNorm1d, one-pixel maps) u and alpha are 0. Global statistics that were never computed
    (mean 0, variance 1: a new layer in round 1) are replaced by those of the batch.
    """

    global_statistics: Tensor  # mu_G and sigma_G [2, C]
    global_weight: Tensor
    global_bias: Tensor
    u: Tensor | None = None  # mixing weights of this iteration, drawn by `draw_u`
    z: Tensor | None = None  # noise of this iteration, drawn by `draw_z`
    alpha: Tensor | None = None  # [B], the last output of the adapter
    alphas: list[Tensor]  # alpha of the images of an evaluation, batch by batch
    at_bound: bool = False  # whether a warning said that alpha is the same bound for every image
    fresh: bool = True
    mode: Mode = "local"
    affine: Literal["local", "global"] = "local"  # affine of pass 3

    def __init__(self, bn: BatchNormLayer, part: "MixIG") -> None:
        super().__init__()
        bin_inside = part.local == "bin" and isinstance(bn, nn.BatchNorm2d)
        self.bn: BINLayer | BatchNormLayer = BINLayer(bn) if bin_inside else bn
        self.affine, self.u_range, self.alphas = part.adapter_affine, part.u, []
        channels = bn.num_features
        self.adapter: Adapter | None = None
        if part.adapter and isinstance(bn, nn.BatchNorm2d):
            self.adapter = Adapter(channels, max(channels // part.reduction, NARROWEST)).to(bn.weight.device)
            self.adapter.requires_grad_(False)  # no optimizer and no term of the main step may change it
        weight = bn.weight.detach()
        zeros, ones = torch.zeros_like(weight), torch.ones_like(weight)
        for name, value in (("statistics", torch.stack((zeros, ones))), ("weight", ones), ("bias", zeros)):
            self.register_buffer(f"global_{name}", value, persistent=False)

    @property
    def global_mean(self) -> Tensor:
        """mu_G [C], a view."""
        return self.global_statistics[0]

    @property
    def global_std(self) -> Tensor:
        """sigma_G [C], a view."""
        return self.global_statistics[1]

    @property
    def norm(self) -> BatchNormLayer:
        """The batch norm that has the affine parameters and running statistics."""
        return self.bn.bn if isinstance(self.bn, BINLayer) else self.bn

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] or [B, C] -> the same shape."""
        if self.mode == "local" or (self.mode == "adapted" and self.adapter is None and not self.training):
            return self.bn(x)
        if not has_positions(x):
            return self._globally(x)
        if self.mode == "mixed":
            return self._mixed(x)
        return self._adapted(x) if self.training else self._infer(x)

    def _globally(self, x: Tensor) -> Tensor:
        """u = 0: normalization only by the global statistics."""
        norm = self.norm
        if not self.training:
            return self.bn(x)
        weight, bias = self._frozen_affine() if self.mode == "adapted" else (norm.weight, norm.bias)
        if self.fresh:
            return F.batch_norm(x, None, None, weight, bias, training=True, eps=norm.eps)
        slope = weight / self.global_std
        shape = (1, -1, *[1] * (x.dim() - 2))
        return torch.addcmul((bias - self.global_mean * slope).view(shape), x, slope.view(shape)).to(x.dtype)

    def _mixed(self, x: Tensor) -> Tensor:
        norm, (low, high) = self.norm, self.u_range
        assert self.u is not None  # drawn by `draw_u`
        has_floor = low < 0 or high > 1 or norm.eps < SMALLEST_STD**2
        mixture = Mixture(norm.eps, self._reference(), self.u, has_floor=has_floor)
        return mixture.normalized(x, norm.weight, norm.bias)

    def _adapted(self, x: Tensor) -> Tensor:
        assert self.adapter is not None
        mixture = Mixture(self.norm.eps, self._reference(), z=self.z)
        y = mixture.normalized(x, *self._frozen_affine(), *self.adapter.weights())
        self.alpha = mixture.alpha
        return y

    def _reference(self) -> Tensor | None:
        """mu_G and sigma_G [2, C], where there are any."""
        return None if self.fresh else self.global_statistics

    @torch.no_grad()
    def _infer(self, x: Tensor) -> Tensor:
        norm, (mean_g, variance_g) = self.norm, running(self.norm)
        assert self.adapter is not None
        mean, variance = instance_moments(x)
        std, std_g = torch.sqrt(variance + norm.eps), torch.sqrt(variance_g + norm.eps)
        away_mean, away_std = mean - mean_g, std - std_g
        alpha = Adapter.alpha(torch.cat([away_mean, away_std], dim=1), None, *self.adapter.weights())
        self.alpha = alpha.squeeze(1)
        return normalize_by(x, mean_g + alpha * away_mean, std_g + alpha * away_std, norm)

    def _frozen_affine(self) -> tuple[Tensor, Tensor]:
        if self.affine == "global":
            return self.global_weight, self.global_bias
        return self.norm.weight.detach(), self.norm.bias.detach()

    def extra_repr(self) -> str:
        """Shown by print(net)."""
        return f"u={self.u_range}"


def mixig_layers(net: nn.Module) -> dict[str, MixIGLayer]:
    """MixIG layers of a net by path, in forward order of registration."""
    return {path: module for path, module in net.named_modules() if isinstance(module, MixIGLayer)}


@contextmanager
def switched(layers: Mapping[str, MixIGLayer], mode: Mode) -> Iterator[None]:
    """Inside the block the layers are in another mode."""
    for layer in layers.values():
        layer.mode = mode
    try:
        yield
    finally:
        for layer in layers.values():
            layer.mode = "local"


@torch.no_grad()
def install_global(net: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Fills the read-only global statistics and affine parameters from a state's arrays; sigma_G = sqrt(var_G + eps).

    Frozen tensors are equal everywhere and are not sent; for them the layer's own are the global ones.
    """
    frozen = getattr(net, "frozen", ())
    for path, layer in mixig_layers(net).items():
        norm = layer.norm
        prefix = f"{path}.bn.bn" if norm is not layer.bn else f"{path}.bn"
        mean, variance, weight, bias = (
            getattr(norm, name) if f"{prefix}.{name}" in frozen else torch.tensor(arrays[f"{prefix}.{name}"])
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        layer.fresh = bool((mean == 0).all() and (variance == 1).all())
        values = {"mean": mean, "std": torch.sqrt(variance + norm.eps), "weight": weight, "bias": bias}
        for name, value in values.items():
            getattr(layer, f"global_{name}").copy_(value)


def draw_u(layers: Mapping[str, MixIGLayer], generator: torch.Generator) -> None:
    """Draws u ~ U(low, high)^C for every layer, in one draw and one transfer to the device."""
    sizes = [len(layer.global_mean) for layer in layers.values()]
    device = next(iter(layers.values())).global_mean.device
    draws = torch.rand(sum(sizes), generator=generator).to(device, non_blocking=True)
    for layer, u in zip(layers.values(), draws.split(sizes)):
        low, high = layer.u_range
        layer.u = low + (high - low) * u


def draw_z(layers: Mapping[str, MixIGLayer], batch: int, generator: torch.Generator) -> None:
    """Draws z ~ N(0, 1) per sample for every layer, in one draw and one transfer to the device."""
    device = next(iter(layers.values())).global_mean.device
    draws = torch.randn(len(layers), batch, generator=generator).to(device, non_blocking=True)
    for layer, z in zip(layers.values(), draws):
        layer.z = z


@dataclass(frozen=True)
class MixIG(Norm):
    """Gives every batch norm, also that of the bottleneck, a second pass by mixed statistics.

    Source: FedIG, section 3.2, and FedIG-A (one anonymous submission to ICLR 2023, without released code). After the
    mixed statistics of pass 2 the client's own gamma and beta act, which is our reading of the equation.

    adapter: add a zero-shot adapter next to every BatchNorm2d (FedIG-A)
    u: the range of the uniform draw. Table 6 has (0, 0.5), (0.5, 1) and (-0.1, 1.1). Equal ends fix u (Table 1: 0 has
    only global and 1 only instance statistics; 0.5)
    reduction: the hidden width of the adapter is C / reduction, at least 4; 16 gives the 0.22 M parameters of the paper
    adapter_affine: the affine parameters while the adapter trains: the client's own, or the global ones of inference
    local: the layer of pass 1 and of evaluation, batch norm or BIN ("learned alpha" of Table 3)

    Without the client part that asks for pass 2 the network equals the one with batch norm: FedAvg or FedBN.
    """

    adapter: bool = False
    u: tuple[float, float] = (0.0, 1.0)
    reduction: Annotated[int, Field(ge=1), Only(adapter=True)] = 16
    adapter_affine: Annotated[Literal["local", "global"], Only(adapter=True)] = "local"
    local: Literal["bn", "bin"] = "bn"
    second_view: ClassVar[bool] = True

    @property
    def breaks(self) -> Facts:
        """With local = "bn" the layer of evaluation is a batch norm; adapters are trained in a step of their own."""
        facts = () if self.local == "bn" else (Fact.BATCH_NORM,)
        return (Fact.PLAIN_LAYERS, *facts, *((Fact.ONE_STEP,) if self.adapter else ()))

    @property
    def provides(self) -> Facts:
        """Adapters, where they are asked for."""
        return (Fact.ADAPTERS,) if self.adapter else ()

    def apply(self, net: Net) -> None:
        """Wraps the layers in place."""
        head = [path for path, module in net.named_modules() if isinstance(module, nn.BatchNorm1d)]
        replace(net, [*batch_norm_paths(net), *head], lambda bn: MixIGLayer(bn, self))
