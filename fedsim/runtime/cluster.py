"""Finds or starts the Ray cluster of a run, and computes how many workers fit on it."""

import math
import os
import socket
import tempfile
from dataclasses import dataclass
from typing import Any

from fedsim.common.about import optional
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.settings import RunSettings

SOCKET_TOO_LONG = "AF_UNIX path length"  # in the text of Ray's error
CONNECT_SECONDS = 10.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # later versions of Ray do this always; this one would print a warning
    "RAY_worker_niceness": "0",  # with Ray's 15, any other program would slow the workers down a lot
    "RAY_max_direct_call_object_size": str(2 * 2**20),  # small replies are faster without the object store
}


class NoRoomError(UserError):
    """The cluster is too small for what was wanted. A sweep, whose options have other names, makes its own advice."""

    def __init__(self, fits: int, wanted: int, cpus: float, gpus: float) -> None:
        self._numbers = (fits, wanted, cpus, gpus)
        super().__init__(f"{self.lack('workers')}: lower run.workers, run.cpus_per_worker or run.gpus_per_worker")

    def lack(self, what: str) -> str:
        """A sentence with the numbers; `what` are the workers of a run or the cells of a sweep."""
        fits, wanted, cpus, gpus = self._numbers
        return f"the Ray cluster has room for {fits} {what} of {cpus:g} CPUs and {gpus:g} GPUs, wanted: {wanted}"


@dataclass(frozen=True)
class WorkerPlan:
    """The number of workers of a run, and what each of them reserves."""

    workers: int
    cpus: float
    gpus: float


def import_ray() -> Any:
    """Import Ray without its log lines and usage statistics; UserError when it is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return optional("ray", "run.runtime 'ray' needs Ray", "ray")


def open_cluster(run: RunSettings) -> bool:
    """Connects to the cluster at `run.ray_address`, or starts a local one; returns whether it was started here.

    A cluster that this process already uses is used unchanged.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error", "namespace": "fedsim"}
    if run.ray_address:
        del quiet["include_dashboard"]
        try:
            check_address(run.ray_address)
            ray.init(address=run.ray_address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"no Ray cluster at {run.ray_address!r} ({reason}); start one with `ray start --head`, "
                "or leave run.ray_address empty"
            ) from None
        return True
    asked = math.ceil(run.workers * run.cpus_per_worker)  # the user may ask for more workers than there are cores
    try:
        # Without an address Ray would join a cluster of this machine.
        ray.init(address="local", num_cpus=max(os.cpu_count() or 1, asked), **quiet)
    except Exception as error:  # on a busy machine Ray raises an error of this general class after 30 s
        ray.shutdown()
        if SOCKET_TOO_LONG in str(error):
            folder = tempfile.gettempdir()
            raise UserError(
                f"Ray did not start, because the path of its sockets in {folder} is too long for this system; give it "
                "a shorter folder (TMPDIR=/tmp before the command), or use run.runtime 'inline'"
            ) from None
        raise ClientFailedError(
            f"Ray did not start ({str(error).strip()}); try again, or use run.runtime 'inline'"
        ) from None
    return True


def check_address(address: str) -> None:
    """Raise OSError when nothing listens at `host:port`; Ray itself would try to connect for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def plan_workers(run: RunSettings, clients: int) -> WorkerPlan:
    """As many workers as `run.workers` says, or as the cluster has room for, but at most one per client.

    With `gpus_per_worker = 0` the workers share the cluster's GPUs evenly, unless the device is the CPU. Raises
    NoRoomError when there is no room for a worker, or not for all that `run.workers` asks for. Raises UserError when
    the device is a GPU and there is none.
    """
    machines = [node["Resources"] for node in import_ray().nodes() if node["Alive"]]
    gpus = 0 if run.device == "cpu" else sum(int(machine.get("GPU", 0)) for machine in machines)
    wanted = min(run.workers or clients, clients)
    if run.device == "cuda" and not gpus:
        raise UserError("run.device is 'cuda' but the Ray cluster has no GPU; use 'auto' or 'cpu'")
    share = run.gpus_per_worker if run.device != "cpu" else 0.0
    cpu_room = sum(room(machine.get("CPU", 0), run.cpus_per_worker) for machine in machines)
    if gpus and not share:
        workers = min(wanted, max(cpu_room, 1))
        share = math.floor(1e4 / math.ceil(workers / gpus)) / 1e4  # Ray counts GPUs in units of 0.0001
    fits = sum(
        min(room(machine.get("CPU", 0), run.cpus_per_worker), gpu_room(machine.get("GPU", 0), share))
        for machine in machines
    )
    if not fits or (run.workers and fits < wanted):
        raise NoRoomError(fits, wanted, run.cpus_per_worker, share)
    workers = min(wanted, fits)
    return WorkerPlan(workers, run.cpus_per_worker, share)


def room(have: float, need: float) -> int:
    """How many times `need` fits into `have`; a very large number when nothing is needed."""
    return 10**6 if not need else int(have / need + 1e-9)


def gpu_room(gpus: float, share: float) -> int:
    """Number of workers for which a machine's GPUs have room; a fraction must be of a single GPU."""
    return int(gpus) * int(1 / share + 1e-9) if 0 < share < 1 else room(gpus, share)
