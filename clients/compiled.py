"""The network's forward pass as one compiled program for all clients of a process: the setting `train.compile`."""

import time

import torch
from torch import Tensor, nn

from fedsim.common.errors import UserError, first_line
from fedsim.models.net import Net


class FeaturesAndLogits(nn.Module):
    """The network as a module whose forward gives features and logits."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, C, H, W] -> (features, logits)."""
        features = self.net.features(images)
        return features, self.net.head(features)


class Compiled:
    """(features, logits) of a training batch by torch.compile, forward and backward; one graph for all clients.

    It is made for batches of `size` images and used for no others, since every other size would be compiled too: a
    last, smaller batch passes through the network as ever. Compilation takes place at the first batch; its seconds are
    in the record of the client that met it (`compile_seconds`), and are spent once per process, not per client or
    round. Results differ from the network's own by rounding; a network that draws random numbers in training (dropout,
    MixStyle, FedSR's representation) gets other draws.
    """

    def __init__(self, net: Net, size: int, mode: str) -> None:
        self.net, self.size = net, size
        self.program = torch.compile(FeaturesAndLogits(net), dynamic=False, mode=mode)
        self.ready = False
        self.seconds = 0.0

    def fits(self, net: nn.Module, images: Tensor) -> bool:
        """Whether the compiled program can take this pass."""
        return net is self.net and net.training and len(images) == self.size and torch.is_grad_enabled()

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits."""
        if self.ready:
            return self.program(images)
        started = time.perf_counter()
        try:
            outputs = self.program(images)
        except Exception as error:  # whatever the compiler raises: it is a world of its own
            raise UserError(
                f"train.compile: PyTorch's compiler failed ({first_line(error, 200)}); on a CPU it needs a C++ "
                "compiler (g++); set train.compile = 'off' to go on without it"
            ) from error
        self.ready, self.seconds = True, time.perf_counter() - started
        return outputs

    def take_seconds(self) -> float:
        """Seconds spent on compiling since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
