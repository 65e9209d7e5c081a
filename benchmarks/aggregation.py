"""Speed of averaging many clients' ResNet-50 states, compared with numpy.copyto, and the peak of extra memory.

    python benchmarks/aggregation.py --clients 30

Targets: at least half of copyto's bytes per second, and extra memory of at most 2.5 models. The memory is measured in a
second pass with tracemalloc (NumPy reports its allocations to it), so that tracing does not change the measured times.
"""

import argparse
import tracemalloc
from collections.abc import Callable

import numpy as np
from turns import clocked

from fedsim.models import build_model
from fedsim.settings import ModelSettings
from strategies.aggregate import weighted_mean


def client_states(clients: int) -> list[dict[str, np.ndarray]]:
    """States that share no memory, as they arrive in messages: read-only views of bytes."""
    net = build_model(ModelSettings(backbone="resnet50"), 7, 3, 64)
    state = {name: value.numpy() for name, value in net.state_dict().items()}
    return [
        {name: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape) for name, array in state.items()}
        for _ in range(clients)
    ]


def best(function: Callable[[], object], repeats: int) -> float:
    """The shortest of several times, in wall seconds."""
    return min(clocked(function)() for _ in range(repeats))[0]


def main() -> None:
    """Print both rates, their ratio and the peak memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    states = client_states(options.clients)
    weights = list(np.random.default_rng(0).dirichlet(np.ones(options.clients)))
    model = sum(array.nbytes for array in states[0].values())
    target = {name: np.empty_like(array) for name, array in states[0].items()}

    def copy_all() -> None:
        for state in states:
            for name, array in state.items():
                np.copyto(target[name], array)

    ratios = []
    for _ in range(3):  # both are measured one after the other, so that other programs slow down both
        ours, copy = best(lambda: weighted_mean(states, weights), options.repeats), best(copy_all, options.repeats)
        ratios.append(copy / ours)
        print(
            f"copyto {options.clients * model / copy / 1e9:.1f} GB/s, weighted mean "
            f"{options.clients * model / ours / 1e9:.1f} GB/s, ratio {copy / ours:.2f}",
            flush=True,
        )
    tracemalloc.start()
    weighted_mean(states, weights)
    peak = tracemalloc.get_traced_memory()[1]
    print(
        f"{options.clients} clients of {model / 1e6:.1f} MB: best ratio {max(ratios):.2f}, "
        f"peak extra memory {peak / model:.2f} models (the result included)"
    )


if __name__ == "__main__":
    main()
