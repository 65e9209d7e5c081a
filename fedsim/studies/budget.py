"""How many cells of a sweep run at the same time, and how many cores and GPUs each of them gets."""

import math
import os
from dataclasses import dataclass

from fedsim.common.cores import free_cores
from fedsim.common.errors import UserError


@dataclass(frozen=True)
class Budget:
    """Limits of a sweep as the user gives them; 0 means that the number follows from the machine.

    jobs: the number of cells that run at the same time
    cores, gpus: the cores and GPUs that one cell reserves (gpus may be a fraction)
    ray: empty for processes on this machine, `local` for a new Ray cluster on it, otherwise the address of a cluster
    (`auto` finds a running cluster)
    launcher: empty, or `slurm KEY=VALUE ...` for jobs of Slurm with these options of `sbatch`; `local` in place of
    `slurm` has submitit run the same jobs on this machine
    """

    jobs: int = 0
    cores: int = 0
    gpus: float = 0.0
    ray: str = ""
    launcher: str = ""

    @property
    def remote(self) -> bool:
        """Whether the cells run elsewhere than in processes of this sweep."""
        return bool(self.ray or self.launcher)


@dataclass(frozen=True)
class Reservation:
    """What a cell may use while it runs: a number of cores, and the CUDA devices that it sees (empty: all devices)."""

    cores: int
    gpus: tuple[str, ...] = ()


def local_reservations(budget: Budget, device: str = "auto", threads: int = 1) -> list[Reservation]:
    """One reservation for each cell that runs at the same time on this machine; UserError when not even one fits.

    A cell gets one core for each of its threads (`run.threads`), or the number of cores in `budget`.
    Cells share the GPUs evenly, unless `budget.gpus` says how many, or what fraction of one, a cell needs.
    """
    have = free_cores()
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
    """The CUDA devices of every cell for which the GPUs have room, in an order that uses all GPUs evenly.

    share: GPUs per cell; with 0, each GPU is one cell's. Raises UserError for a share above 1 that is not a whole
    number, or that is larger than the number of GPUs.
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
