"""How many cells of a sweep run at the same time, and how many cores and GPUs each of them gets."""

import math
import os
from dataclasses import dataclass

from fedsim.cores import free_cores
from fedsim.errors import UserError


@dataclass(frozen=True)
class Budget:
    """Limits of a sweep as the user gives them; with 0 the machine decides.

    jobs: the number of cells at the same time
    cores, gpus: what one cell reserves (gpus may be a fraction)
    ray: empty for processes on this machine, `local` for a Ray cluster of its own, else the address of a cluster
    (`auto` finds a running one)
    """

    jobs: int = 0
    cores: int = 0
    gpus: float = 0.0
    ray: str = ""


@dataclass(frozen=True)
class Reservation:
    """What one cell at a time may use: a number of cores, and the CUDA devices that it sees (empty: all devices)."""

    cores: int
    gpus: tuple[str, ...] = ()


def local_reservations(budget: Budget, device: str = "auto", threads: int = 1) -> list[Reservation]:
    """One reservation for each cell that runs at the same time on this machine; UserError when not even one fits.

    A cell gets a core for each of its threads (`run.threads`), or as many cores as are asked for.
    GPUs are shared evenly unless `gpus` says how much of one a cell needs.
    """
    have = cores()
    if budget.cores > have:
        raise UserError(f"--cores-per-cell {budget.cores}: this machine has {have} cores")
    need = budget.cores or threads
    room = budget.jobs if budget.jobs and not budget.cores else max(have // need, 1)
    count = min(room, budget.jobs or room)
    names = [] if device == "cpu" else visible_gpus()
    if budget.gpus and not names:
        why = "run.device is 'cpu'" if device == "cpu" else "PyTorch sees no CUDA device here"
        raise UserError(f"--gpus-per-cell {budget.gpus:g}: {why}")
    places = gpu_places(names, budget.gpus)
    if budget.gpus:
        count = min(count, len(places))
    return [Reservation(need, places[index % len(places)] if places else ()) for index in range(count)]


def gpu_places(names: list[str], share: float) -> list[tuple[str, ...]]:
    """The devices of each cell that the GPUs hold, spread over the GPUs first; without a share each GPU once.

    UserError for a share that no GPU holds, or one above 1 that is not whole.
    """
    if not names or not share:
        return [(name,) for name in names]
    if share > 1:
        if share != int(share) or share > len(names):
            raise UserError(
                f"--gpus-per-cell {share:g}: give a fraction of one GPU, or a whole number up to {len(names)}"
            )
        return [tuple(names[start : start + int(share)]) for start in range(0, len(names) - int(share) + 1, int(share))]
    return [(name,) for _ in range(math.floor(1 / share + 1e-9)) for name in names]


def visible_gpus() -> list[str]:
    """Names of this machine's CUDA devices, as CUDA_VISIBLE_DEVICES takes them."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in named.split(",")][:count] if named else [str(index) for index in range(count)]


def cores() -> int:
    """CPU cores that this process may use."""
    return free_cores()
