"""Wall time of a sweep, start of its command included, next to bare PyTorch loops of the same cells on the same cores.

    python benchmarks/sweep_cells.py
    python benchmarks/sweep_cells.py --config pacs --preset imagenet-small --root PACS --methods fedavg \\
        --targets photo,sketch --set data.normalize=imagenet --set train.optimizer=sgd
    python benchmarks/sweep_cells.py --fixed [--config hospitals] [--methods A,B] [--set key=value ...]

By default the cells are 20 rounds of digits with the rows whose clients train exactly as those of FedAvg. The loops
are those of `overhead.py`, which use SGD, as many at a time as the sweep has jobs, one process for each job. A process
takes its cells one after the other and has imported everything and read its data before the clock starts, so that only
the work of the cells counts. Both sides take turns. The goal is a ratio of at most 1.10.

With --fixed it is what a cell costs besides its rounds: the processor seconds of all processes of a sweep whose cells
have one round, with 1 seed and with 21, and their difference by cell. The goal is at most 0.15 (Linux alone).
"""

import argparse
import ctypes
import itertools
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from overhead import bare_loop
from turns import medians, say, take_turns

from fedsim.settings.experiment import Experiment
from fedsim.studies.axes import Axes
from fedsim.studies.plan import plan_cells

LIKE_FEDAVG = "fedavg,fedadam,fedyogi,fedadagrad,fedavgm,fedgma,krum,fedomg,silobn"


def loops(experiments: list[Experiment], ready: Barrier) -> None:
    """Run the bare loop of each experiment, after one round that reads the data and fills the allocator's memory."""
    torch.set_num_threads(1)
    try:
        bare_loop(experiments[0].replace(train={"rounds": 1}))
    except BaseException:
        ready.abort()  # nobody waits for this process for ever
        raise
    ready.wait()
    for experiment in experiments:
        bare_loop(experiment)


def seconds_of_loops(experiments: list[Experiment], jobs: int) -> float:
    """Wall seconds of all loops, when each of `jobs` processes takes its share of them."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(jobs + 1)
    workers = [context.Process(target=loops, args=(experiments[job::jobs], ready)) for job in range(jobs)]
    for worker in workers:
        worker.start()
    ready.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    assert not any(worker.exitcode for worker in workers)
    return time.perf_counter() - started


def seconds_of_sweep(words: list[str], jobs: int, folder: Path) -> float:
    """Wall seconds of the command `fedsim sweep` for the same cells."""
    command = [sys.executable, "-m", "fedsim", "sweep", *words, "--jobs", str(jobs), "--cores-per-cell", "1"]
    started = time.perf_counter()
    subprocess.run([*command, "--output", str(folder)], check=True, capture_output=True)
    return time.perf_counter() - started


def processor_seconds(command: list[str]) -> float:
    """Processor seconds of a command and of all processes below it, also of those that end after it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    try:
        while True:  # the fork server, which becomes a child of this process
            os.wait()
    except ChildProcessError:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fixed_cost(config: str, methods: str, overrides: list[str], repeats: int) -> None:
    """Print the processor seconds of a sweep with few and with many cells of one round, and those of one more cell."""
    adopts = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
    ctypes.CDLL(None).prctl(adopts, 1, 0, 0, 0)
    words = [sys.executable, "-m", "fedsim", "sweep", config, "--methods", methods, "--jobs", "1"]
    words += [word for override in [*overrides, "train.rounds=1"] for word in ("--set", override)]
    for repeat in range(repeats):
        seconds, cells = [], []
        for seeds in (1, 21):
            with tempfile.TemporaryDirectory() as folder:
                numbers = ",".join(map(str, range(seeds)))
                seconds.append(processor_seconds([*words, "--seeds", numbers, "--output", folder]))
                cells.append(len(list(Path(folder).rglob("summary.csv"))))
        cost = (seconds[1] - seconds[0]) / (cells[1] - cells[0])
        print(f"repeat {repeat}: {cells[0]} cells {seconds[0]:.2f} s, {cells[1]} cells {seconds[1]:.2f} s: ", end="")
        print(f"{cost:.3f} processor seconds for one more cell", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="what a cell costs besides its rounds")
    parser.add_argument("--config", default="")
    parser.add_argument("--preset", default="")
    parser.add_argument("--root", default="", help="folder of the images")
    parser.add_argument("--methods", default="")
    parser.add_argument("--targets", default="rot0,rot30,rot75")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    return parser.parse_args()


def sweep_words(config: str, methods: str, overrides: list[str], asked: argparse.Namespace) -> list[str]:
    """The words of `fedsim sweep` for these cells, without its output folder."""
    words = [config, "--methods", methods, "--targets", asked.targets, "--seeds", "0"]
    for override in overrides:
        words += ["--set", override]
    if asked.preset:
        words += ["--preset", asked.preset]
    return words


def compare(config: str, methods: str, asked: argparse.Namespace) -> None:
    """Run the sweep and the bare loops of its cells in turn, and print the ratio of the medians."""
    overrides = [*asked.overrides, "run.device=cpu"]
    if asked.root:
        overrides.append(f"data.root={asked.root}")
    words = sweep_words(config, methods, overrides, asked)
    axes = Axes(methods.split(","), asked.targets.split(","), [0])
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as name:
        planned = plan_cells(config, axes, [*overrides, f"run.output={name}/plan"], asked.preset)
        cells = [cell.experiment for cell in planned]
        sides = {
            "loops": lambda: (seconds_of_loops(cells, asked.jobs),),
            "sweep": lambda: (seconds_of_sweep(words, asked.jobs, Path(name) / str(next(numbers))),),
        }
        turns = take_turns(sides, asked.repeats, show=say)
    sweep, loops_alone = medians(turns["sweep"])[0], medians(turns["loops"])[0]
    print(f"{len(cells)} cells, {asked.jobs} at a time: {3600 * len(cells) / sweep:.0f} cells an hour, ", end="")
    print(f"{sweep / loops_alone:.3f} of the time of the bare loops")


def main() -> None:
    """Measure a whole sweep, or with --fixed what one more cell costs."""
    asked = arguments()
    if asked.fixed:
        fixed_cost(asked.config or "hospitals", asked.methods or "fedavg,krum", asked.overrides, asked.repeats)
    else:
        compare(asked.config or "digits", asked.methods or LIKE_FEDAVG, asked)


if __name__ == "__main__":
    main()
