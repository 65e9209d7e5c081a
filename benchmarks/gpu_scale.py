"""How much benchmarks/gpu.py measures: on a GPU, and in the small form for a CPU."""

from dataclasses import dataclass

from fedsim.methods.table import METHODS


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    methods: tuple[str, ...]
    backbones: tuple[str, ...]
    size: int
    batch: int
    repeats: int
    clients: tuple[int, ...]
    rounds: int
    precisions: tuple[str, ...] = ("fp32", "bf16")
    modes: tuple[str, ...] = ("sequential", "side by side", "compiled", "CUDA graphs")


FULL = Scale(tuple(METHODS), ("resnet18", "resnet50"), 224, 64, 10, (30, 100), 3)
SMALL = Scale(
    ("fedavg", "ccst"),
    ("digits-cnn-bn",),
    28,
    8,
    1,
    (2,),
    1,
    precisions=("fp32",),
    modes=("sequential", "side by side"),
)
