"""Thirty clients of the digits CNN, five of ResNet-18, or a thousand with small pictures, next to a plain loop.

    python benchmarks/thirty_clients.py                                    (3 domains x 10, Dirichlet)
    python benchmarks/thirty_clients.py --ways one-process,default,ray,side-by-side,compiled --repeats 3
    python benchmarks/thirty_clients.py --model resnet18                   (five clients, 64 pixels)
    python benchmarks/thirty_clients.py --model cifar --repeats 1          (1,000 clients, 50 pictures of 32 x 32 each)
    python benchmarks/thirty_clients.py --rounds 3 --repeats 1             (a quick measurement, on a busy machine)

Every repetition measures each way once. The plain loop is measured with one thread and with two, and the faster one is
the reference. Two plain loops at once, each with one thread and in a process of its own, show what two cores give to
this work without anything around it: no way can be below half of their time. There are two numbers for each way: the
seconds of the whole run, which include the start of processes but not of Python itself, and the seconds of a round
after the first, by the clock of `rounds.csv`.
"""

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from overhead import bare_loop, experiment_for, make_folder
from turns import medians, say, take_turns

from fedsim.records.callbacks import RunCallback
from fedsim.runs.plan import complete
from fedsim.runs.workspace import close_workspaces
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import Experiment, from_table

WAYS: dict[str, Callable[[Experiment], Experiment]] = {
    "one-process": lambda run: run,
    "default": lambda run: run.replace(run={"processes": 0}),  # forks processes after the first round
    "two-threads": lambda run: run.replace(run={"threads": 2}),  # in one process
    "ray": lambda run: run.replace(run={"runtime": "ray", "workers": 2}),
    "side-by-side": lambda run: run.replace(train={"side_by_side": 30}),
    "compiled": lambda run: run.replace(train={"compile": "default"}),
}


# The form of common cross-device benchmarks on CIFAR-10: 50 images a client, batches of 10, a small network.
THOUSAND = {
    "name": "thousand",
    "data": {"dataset": "synthetic_pictures:Pictures", "image_size": 32, "clients_per_domain": 200},
    "model": {"backbone": "digits-cnn"},
    "train": {"batch_size": 10, "lr": 0.01},
    "run": {"target": "f", "threads": 1, "device": "cpu", "processes": 1, "keep_predictions": False},
}


class Clock(RunCallback):
    """A callback that notes when each round has ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def round_seconds(self) -> float:
        """Median seconds from one round to the next, without the first, which loads the data."""
        pairs = list(zip(self.times[1:], self.times[2:]))
        return statistics.median(after - before for before, after in pairs)


def federation(model: str, folder: Path, rounds: int) -> Experiment:
    """Thirty clients of three domains of digits, a thousand of five domains of pictures, or five of larger ones."""
    if model == "cifar":
        return complete(from_table(THOUSAND | {"train": THOUSAND["train"] | {"rounds": rounds}}))
    if model.startswith("digits"):
        found = experiment_for(model, folder, rounds, 1)
        data = {"domains": ["rot0", "rot15", "rot30", "rot45"], "clients_per_domain": 10, "partition": "dirichlet"}
        return complete(found.replace(data=data, run={"target": "rot45"}))
    found = experiment_for(model, folder, rounds, 1)
    make_folder(folder / "six", 64, 280, "abcdef")
    return complete(found.replace(data={"root": str(folder / "six")}, run={"target": "f"}))


def bare(experiment: Experiment, threads: int) -> tuple[float, float]:
    """(seconds of the run, seconds of a round) of the plain loop."""
    torch.set_num_threads(threads)
    measured = timed(experiment, bare_loop)
    torch.set_num_threads(1)
    return measured


def two_at_once(experiment: Experiment) -> tuple[float, float]:
    """Half of the (seconds of the run, seconds of a round) of two plain loops at the same time."""
    whole, one = timed(experiment, both)
    return whole / 2, one / 2


def both(experiment: Experiment) -> None:
    """Two plain loops, each in a process of its own."""
    context = multiprocessing.get_context("fork")  # the children have everything that was imported
    children = [context.Process(target=bare_loop, args=(experiment,)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        if child.exitcode:
            raise RuntimeError(f"a plain loop ended with exit code {child.exitcode}")


def timed(experiment: Experiment, work: Callable[[Experiment], object]) -> tuple[float, float]:
    """(seconds of the run, seconds of a round after the first) of some work."""
    seconds = []
    for rounds in (1, experiment.train.rounds):
        started = time.perf_counter()
        work(experiment.replace(train={"rounds": rounds}))
        seconds.append(time.perf_counter() - started)
    return seconds[1], (seconds[1] - seconds[0]) / (experiment.train.rounds - 1)


def ours(way: str, experiment: Experiment, folder: Path) -> tuple[float, float]:
    """(seconds of the run, seconds of a round) of fedsim."""
    close_workspaces()
    clock, started = Clock(), time.perf_counter()
    launch(WAYS[way](experiment).replace(run={"output": str(folder)}), [clock])
    return time.perf_counter() - started, clock.round_seconds()


def sides_of(experiment: Experiment, ways: list[str], folder: Path) -> dict[str, Callable[[], tuple[float, float]]]:
    """What takes turns: bare loops with one and two threads, two at once, and the ways of fedsim."""
    numbers = itertools.count()
    sides = {
        "bare loop, 1 thread(s)": lambda: bare(experiment, 1),
        "bare loop, 2 thread(s)": lambda: bare(experiment, 2),
        "two bare loops at once, halved": lambda: two_at_once(experiment),
    }
    for way in ways:
        sides[way] = lambda way=way: ours(way, experiment, folder / f"{way}{next(numbers)}")
    return sides


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="digits-cnn-bn", choices=["digits-cnn", "digits-cnn-bn", "resnet18", "cifar"]
    )
    parser.add_argument("--ways", default="one-process,default,ray", help=", ".join(WAYS))
    parser.add_argument("--rounds", type=int, default=0, help="0: 30 of digits, 4 of others; at least 3")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rounds = args.rounds or (30 if args.model.startswith("digits") else 4)
    with tempfile.TemporaryDirectory() as name:
        experiment = federation(args.model, Path(name), rounds)
        bare_loop(experiment.replace(train={"rounds": 1}))  # images are decoded and everything is imported
        measured = take_turns(sides_of(experiment, args.ways.split(","), Path(name)), args.repeats, show=say)
    print(f"{args.model}, {rounds} rounds, {args.repeats} repetition(s), torch {torch.__version__}")
    show({way: medians(turns) for way, turns in measured.items()})


def show(middle: dict[str, tuple[float, float]]) -> None:
    """Print the medians (whole seconds, seconds of a round) of each way, and their ratios to the faster bare loop."""
    best = [min(middle[f"bare loop, {threads} thread(s)"][place] for threads in (1, 2)) for place in (0, 1)]
    print(f"{'way':32} {'whole s':>9} {'ratio':>7} {'round s':>9} {'ratio':>7}")
    for way, (whole, one) in middle.items():
        print(f"{way:32} {whole:9.2f} {whole / best[0]:7.2f} {one:9.3f} {one / best[1]:7.2f}")


if __name__ == "__main__":
    main()
