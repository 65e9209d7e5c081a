"""How many CPU cores this process may use according to its affinity and its control group."""

import math
import os
from pathlib import Path

PROC = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def free_cores() -> int:
    """Number of cores that this process may use, at least one: by affinity (taskset, Slurm) and quota (containers)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(allowed, math.floor(quota() + 1e-9)) if quota() < math.inf else allowed, 1)


def quota(proc: Path | None = None, groups: Path | None = None) -> float:
    """The number of cores that the control group and its parents allow; infinite without a limit.

    Version 2 of control groups has `cpu.max` (`200000 100000`, or `max`); version 1 has `cpu.cfs_quota_us` (-1: no
    limit) and `cpu.cfs_period_us`. In a container, its own group is at the root of their file system.
    """
    proc, groups = proc or PROC, groups or GROUPS
    limits = [math.inf]
    for line in _text(proc).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root = groups
        elif "cpu" in controllers.split(","):
            root = groups / "cpu"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limits.append(_limit(folder))
            if folder == root:
                break
    return min(limits)


def _limit(folder: Path) -> float:
    limits = _text(folder / "cpu.max").split()
    if not limits:
        limits = [_text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    try:
        granted, period = (float(word) for word in limits)
    except ValueError:  # the text is "max", or the files do not exist
        return math.inf
    return granted / period if granted > 0 and period > 0 else math.inf


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
