"""Memory in a long run: the resident size of the driver and its workers in hundreds of rounds of FedAvg on digits.

    python benchmarks/soak.py                     # 500 rounds inline, 200 on Ray
    python benchmarks/soak.py --runtime ray --rounds 1000 --method gperxan

The memory is flat when the resident size of every process grows by less than 5 % from round 5 to the last round; by
round 5 all imports, the data, the first checkpoint and the pools of Flower and Ray are in memory. Exit code 1 when it
is not.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

from fedsim.records.callbacks import RunCallback
from fedsim.runs.plan import resolve
from fedsim.runs.serve import serve
from fedsim.runtime.launch import make_grid
from fedsim.settings.experiment import Experiment, read_experiment

WARM_UP = 5
SHARE = 0.05
ROUNDS = {"inline": 500, "ray": 200}


def resident(pid: int) -> float:
    """The resident size of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


class Watch(RunCallback):
    """A callback that notes the memory of every process after each round."""

    def __init__(self, grid: object) -> None:
        self.grid = grid
        self.pids: dict[str, int] = {"driver": os.getpid()}
        self.sizes: dict[str, list[float]] = {}
        self.started = time.perf_counter()

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Find the processes; Ray's workers exist now."""
        if hasattr(self.grid, "workers"):
            self.pids |= {f"worker {place}": pid for place, (pid, _) in enumerate(self.grid.workers())}

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Note one number per process."""
        for name, pid in self.pids.items():
            self.sizes.setdefault(name, []).append(resident(pid))

    def on_failure(self, error: BaseException) -> None:
        """Nothing."""


def soak(runtime: str, rounds: int, method: str) -> bool:
    """Run the experiment and print a line per process; returns whether all are flat."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"train.rounds={rounds}", f"method.name={method}", f"run.runtime={runtime}", f"run.output={folder}"]
        settings += ["data.fraction=0.1", "train.batch_size=32", "run.threads=1", "run.device=cpu", "run.workers=2"]
        plan = resolve(read_experiment("digits", settings))
        grid = make_grid(plan)
        watch = Watch(grid)
        try:
            serve(grid, plan, [watch])
        finally:
            grid.close()
    seconds = time.perf_counter() - watch.started
    flat = True
    for name, sizes in watch.sizes.items():
        start, middle, end = sizes[WARM_UP], sizes[len(sizes) // 2], sizes[-1]
        flat &= end < (1 + SHARE) * start
        print(
            f"{runtime:6} {method} {rounds} rounds {seconds:5.0f} s  {name:9} round {WARM_UP} {start:6.1f} MiB  "
            f"round {len(sizes) // 2} {middle:6.1f}  round {len(sizes) - 1} {end:6.1f}  "
            f"growth {100 * (end / start - 1):+.1f} %",
            flush=True,
        )
    return flat


def main() -> None:
    """Measure the chosen runtimes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=ROUNDS, action="append")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--method", default="fedavg")
    args = parser.parse_args()
    results = [soak(runtime, args.rounds or ROUNDS[runtime], args.method) for runtime in args.runtime or ROUNDS]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
