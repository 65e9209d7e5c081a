"""Gradient steps on unlabelled test batches, which Tent and SHOT-IM take on a copy of the network."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedsim.models.infer.base import Predict
from fedsim.models.net import Net
from fedsim.models.norms.moments import BatchNormLayer


def entropy(logits: Tensor) -> Tensor:
    """-sum_k p_k log p_k of each row [B] of logits [B, M], with p = softmax(logits)."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def adapting(
    net: Net,
    chosen: Callable[[Net], Sequence[nn.Parameter]],
    loss: Callable[[Tensor], Tensor],
    lr: float,
    steps: int,
    batch: int,
) -> Predict:
    """A function that takes steps of Adam on loss(logits) for each batch, and returns the logits before the last one.

    It works on a copy of `net`, whose chosen parameters go on from batch to batch. Layers of batch norm use the
    statistics of the batch, and their running ones stay. A batch of one image has none: it is predicted by the running
    statistics and moves nothing.
    """
    with torch.inference_mode(False):
        net = copy.deepcopy(net).eval().requires_grad_(False)
        parameters = [parameter.requires_grad_(True) for parameter in chosen(net)]
        optimizer = torch.optim.Adam(parameters, lr)
    layers = [module for module in net.modules() if isinstance(module, BatchNormLayer)]
    for layer in layers:
        layer.momentum = 0.0

    def predicted(images: Tensor) -> Tensor:
        several = len(images) > 1
        for layer in layers:
            layer.train(several)
        with torch.inference_mode(False), torch.enable_grad():
            images = images.clone()  # gradients cannot flow through a tensor of inference mode
            for _ in range(steps if several else 0):
                logits = net(images)
                optimizer.zero_grad()
                loss(logits.float()).backward()
                optimizer.step()
        if several:
            return logits.detach()
        with torch.no_grad():
            return net(images)

    return lambda images: torch.cat([predicted(part) for part in images.split(batch)])
