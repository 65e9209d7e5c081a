"""How much benchmarks/gpu.py measures: on a GPU, and in the small form for a CPU."""

from dataclasses import dataclass

from fedsim.methods.table import METHODS


@dataclass(frozen=True)
class Scale:
    """How much is measured. jobs: rows whose short runs take place at a time; changes: further settings of these."""

    methods: tuple[str, ...]
    backbones: tuple[str, ...]
    size: int
    batch: int
    repeats: int
    clients: tuple[int, ...]
    rounds: int
    iterations: int
    jobs: int
    precisions: tuple[str, ...] = ("fp32", "bf16")
    modes: tuple[str, ...] = ("sequential", "side by side", "compiled", "CUDA graphs")
    changes: tuple[str, ...] = ()


# Images of 28 pixels: on others the digits CNN resizes its maps, of which PyTorch has no deterministic form.
FULL = Scale(
    tuple(METHODS),
    ("resnet18", "resnet50"),
    224,
    64,
    3,
    (30, 100),
    2,
    iterations=50,
    jobs=14,
    changes=("data.image_size=28",),
)
SMALL = Scale(
    ("fedavg", "ccst"),
    ("digits-cnn-bn",),
    28,
    8,
    1,
    (2,),
    1,
    iterations=2,
    jobs=1,
    precisions=("fp32",),
    modes=("sequential", "side by side"),
    changes=("train.iterations=1", "data.fraction=0.04"),
)
