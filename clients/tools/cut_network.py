"""A network in two halves: up to a module of its backbone, and after that module."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedsim.models.net import Net


class _ReachedError(Exception):
    """The cut module was called. This is not an error: it ends a forward pass there."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class CutNetwork:
    """The network cut after the module at `path`.

    `front(images)` gives the output of that module, and `tail(output)` the features that the head sees. `front` must be
    called first, because it records the shapes of all outputs before the cut.

    The code does not depend on the layers of any backbone. The tail is the network's own forward pass, in which every
    module with parameters that ran before the cut returns zeros in the shape of its output, without computing anything.
    """

    def __init__(self, net: Net, path: str) -> None:
        self.net, self.cut = net, net.get_submodule(path)
        names = path.split(".")
        above = {"", *(".".join(names[: count + 1]) for count in range(len(names)))}
        self.before = [  # the outermost modules with parameters that do not contain the cut module
            module
            for name, module in net.named_modules()
            if name not in above
            and name.rpartition(".")[0] in above - {path}
            and any(True for _ in module.parameters())
        ]
        self.outputs: dict[nn.Module, Tensor] = {}

    def front(self, images: Tensor) -> Tensor:
        """The output of the cut module; the modules after it do not run."""

        def reached(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            raise _ReachedError(output)

        def note(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            kept = self.outputs.get(module)
            if kept is None or kept.shape != output.shape:
                self.outputs[module] = torch.zeros_like(output)

        handles = [module.register_forward_hook(note) for module in self.before]
        handles.append(self.cut.register_forward_hook(reached))
        try:
            self.net.features(images)
        except _ReachedError as found:
            return found.output
        finally:
            for handle in handles:
                handle.remove()
        raise ValueError("the module at which the network is cut was never called")

    def tail(self, level: Tensor) -> Tensor:
        """The features that follow from the output of the cut module."""
        with self._standing_for({**self.outputs, self.cut: level}):
            return self.net.features(level.new_zeros((len(level), 1, 1, 1)))

    def onward(self, level: Tensor, later: "CutNetwork") -> Tensor:
        """The output of the module at which `later` is cut, given that of this cut, which comes before it."""
        with self._standing_for({**self.outputs, self.cut: level}):
            return later.front(level.new_zeros((len(level), 1, 1, 1)))

    @contextmanager
    def _standing_for(self, outputs: dict[nn.Module, Tensor]) -> Iterator[None]:
        """Inside the block the modules return these outputs instead of computing them."""
        for module, output in outputs.items():
            module.forward = lambda *inputs, output=output: output
        try:
            yield
        finally:
            for module in outputs:
                del module.forward  # the method of the class is used again
