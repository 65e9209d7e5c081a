"""Batch-norm statistics computed again on the unseen domain."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.common.tasks import ANY_TASK
from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.net import Net
from fedsim.models.norms.moments import BatchNormLayer, running
from fedsim.parts.facts import Fact
from fedsim.tensors.kinds import Kind, tensor_kinds


@dataclass(frozen=True)
class Recompute(Infer):
    """All normalization layers get statistics of the unseen domain's unlabelled images, in one pass.

        mu <- 1/N sum_b n_b mu_b,   sigma^2 <- 1/N sum_b n_b (sigma_b^2 + mu_b^2) - mu^2

    The images pass in groups b of n_b images, in a random order that the seed fixes. Within the pass every layer
    normalizes a group by the group's own mean and variance, as in training; sigma_b^2 is the unbiased variance.
    Predictions then use mu and sigma^2 in eval mode. The clients' statistics are not used at all, and the network that
    they train is not changed.

    Source: SiloBN (Andreux et al. 2020), known to us from a secondary description: one pass in training mode, or a
    cumulative average. Either of them depends on the order and the number of images in the last batches, and leaves out
    the variance between the means of batches. Pooled moments take their place here. The rule is transductive: it sees
    the test images before it predicts.

    batch: the number of images in a group, for every size of the evaluation batches. A last group of one image, which
    has no variance in a layer of vectors, joins the group before it
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    batch: Annotated[int, Field(ge=2)] = 64
    transductive: ClassVar[bool] = True
    shuffled: ClassVar[bool] = True
    provides = (Fact.TARGET_STATISTICS,)

    @torch.no_grad()
    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A copy of the network with the new statistics, in eval mode; `net` is not changed.

        Raises UserError for fewer than two images, and for a layer whose statistics have other names than batch norm's.
        """
        net = copy.deepcopy(net).eval()
        layers = statistics_layers(net)
        for layer in layers:
            layer.train()
            layer.momentum = 1.0  # the running statistics are then those of the last group
        sums = [torch.zeros(2, len(running(layer)[0]), dtype=torch.float64) for layer in layers]
        count = 0
        for images in groups(batches(), self.batch):
            net(images)
            count += len(images)
            for total, layer in zip(sums, layers, strict=True):
                mean, variance = (tensor.cpu().double() for tensor in running(layer))
                total += len(images) * torch.stack([mean, variance + mean.square()])
        for total, layer in zip(sums, layers, strict=True):
            mean, square = total / count
            mean_now, variance_now = running(layer)
            mean_now.copy_(mean)
            variance_now.copy_((square - mean.square()).clamp_min(0))
        return net.eval()


def statistics_layers(net: nn.Module) -> list[BatchNormLayer]:
    """The layers with running statistics. Raises UserError for statistics that they do not keep as batch norm does."""
    layers = {path: module for path, module in net.named_modules() if getattr(module, "running_mean", None) is not None}
    statistics = {f"{path}.{name}".lstrip(".") for path in layers for name in ("running_mean", "running_var")}
    for name, kind in tensor_kinds(net).items():
        if kind is Kind.BN_STATISTICS and name not in statistics:
            raise UserError(f"recompute does not know how to compute {name} again; use method.infer = 'eval_mode'")
    return [cast(BatchNormLayer, layer) for layer in layers.values()]  # or a layer with the same tensors


def groups(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The images of all batches in groups of `size`. The last group has 2 to size + 1 images.

    Raises UserError for fewer than two images.
    """
    held: Tensor | None = None
    for images in batches:
        held = images if held is None else torch.cat([held, images])
        while len(held) > size + 1:
            yield held[:size]
            held = held[size:]
    if held is None or len(held) < 2:
        raise UserError("recompute needs at least two images of the unseen domain; use method.infer = 'eval_mode'")
    yield held
