"""What each client costs the server when there are many: seconds, processor seconds, memory of the driver, and disk.

Each client has 10 images of the digits (nine for training, one for validation) from one of five domains. By
default there are two measurements for every number of clients N:

    1 %    rounds in which 1 % of the clients are drawn; these train, and validate the round's model
    all    one round in which all N clients do so

A number as a mode, as in `--clients 100000 --modes 100`, gives rounds in which that many are drawn.

Every run is a separate process, and the runs of different N take turns. Processor seconds are those of the process and
its children from the first round on; memory is the largest resident size of the driver.

    python benchmarks/clients_scale.py [--clients 100,1000,10000] [--rounds 3] [--modes some,all] [--repeats 1]
                                       [--runtimes inline,flower]

Runtime `flower` is Flower's own simulation engine with the same apps; it is only asked for up to --flower-most clients.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
DOMAINS, IMAGES = 5, 10
FLAT_SECONDS, FLAT_MEMORY = 1.3, 1.1


def run(clients: int, mode: str, rounds: int, runtime: str, output: str) -> None:
    """Do one run in this process; print its measurements as JSON."""
    os.environ["MANY_DIGITS"] = str(IMAGES * clients // DOMAINS)
    sys.path.insert(0, str(HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    from fedsim.runs.plan import resolve
    from fedsim.runtime.launch import carry_out
    from fedsim.settings.experiment import from_table

    drawn = {"all": clients, "some": max(clients // 100, 1)}.get(mode) or int(mode)
    experiment = from_table(
        {
            "name": "many",
            "data": {"dataset": "many_digits:ManyDigits", "clients_per_domain": clients // DOMAINS, "split": "random"},
            "train": {
                "rounds": 1 if mode == "all" else rounds,
                "clients_per_round": 0 if drawn == clients else drawn,
                "evaluate_clients": "drawn",
                "lr": 0.05,
                "momentum": 0.9,
            },
            "run": {
                "target": "rot75",
                "output": output,
                "threads": 1,
                "processes": 1,
                "runtime": runtime,
                "keep_predictions": False,
            },
        }
    )
    watch = Watch()
    plan = resolve(experiment)
    watch.start(plan.folder)
    carry_out(plan, [watch])
    print(json.dumps(measurements(watch, plan.folder, drawn)))


def measurements(watch: "Watch", folder: Path, drawn: int) -> dict[str, float]:
    """What a run cost: (processor) seconds a client and round, seconds before round 1, MiB of memory and disk.

    drawn: the clients of a round
    """
    seconds = pd.read_csv(folder / "rounds.csv")["round_seconds"].iloc[1:]
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {
        "seconds": float(seconds.mean()) / drawn,
        "processor": watch.processor() / (drawn * len(seconds)),
        "start": watch.began,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "disk": watch.most / 2**20,
        "left": sum(file.stat().st_size for file in files) / 2**20,
    }


class Watch:
    """A callback that notes when a run's first round begins, and how many bytes the run's files take."""

    def __init__(self) -> None:
        self.created, self.began, self.base = time.monotonic(), 0.0, 0.0
        self.most = 0
        self._stop = threading.Event()

    def start(self, folder: Path) -> None:
        """Measure the folder twice a second."""
        threading.Thread(target=self._look, args=(folder,), daemon=True).start()

    def processor(self) -> float:
        """Processor seconds since the first round began."""
        return used() - self.base

    def on_start(self, experiment, folder: Path) -> None:
        """Nothing."""

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Note the time of row 0, which is recorded when the first round begins."""
        if row["round"] == 0:
            self.began, self.base = time.monotonic() - self.created, used()

    def on_end(self, summary: dict) -> None:
        """The end."""
        self._stop.set()

    def _look(self, folder: Path) -> None:
        while not self._stop.wait(0.5):
            self.most = max(self.most, on_disk(folder))


def used() -> float:
    """Processor seconds of this process and of its finished children."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def on_disk(folder: Path) -> int:
    """Bytes of a folder's files, and of the open files of this process that have no name."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    for handle in Path("/proc/self/fd").iterdir():
        try:
            found = handle.stat()
        except OSError:
            continue
        if found.st_nlink == 0 and str(folder) in str(handle.readlink()):
            total += found.st_size
    return total


def measure(clients: int, mode: str, rounds: int, runtime: str) -> dict[str, float]:
    """The measurements of one run in a separate process."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, __file__, "--one", f"{clients},{mode},{rounds},{runtime}", "--output", output]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"{clients} clients, {mode}, {runtime} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        return json.loads(done.stdout.splitlines()[-1])


def show(results: dict[tuple[str, str, int], list[dict[str, float]]]) -> None:
    """Print the table. Seconds are relative to the smallest number of clients, memory to the previous."""
    table = Table(
        "runtime", "drawn", "clients", "ms a client", "processor ms", "before round 1", "driver MiB", "disk MiB"
    )
    for (runtime, mode, clients), runs in results.items():
        found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        table.add_row(
            runtime,
            {"some": "1 %"}.get(mode, mode),
            f"{clients:,}",
            f"{1000 * found['seconds']:.1f}",
            f"{1000 * found['processor']:.1f}",
            f"{found['start']:.1f} s",
            f"{found['memory']:.0f}",
            f"{found['disk']:.1f}, {found['left']:.2f} left",
        )
    table.caption = f"promised: ms a client within {FLAT_SECONDS}, memory within {FLAT_MEMORY} from 1,000 to 10,000"
    Console(width=110).print(table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="100,1000,10000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="some,all")
    parser.add_argument("--runtimes", default="inline")
    parser.add_argument("--flower-most", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--output", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run every combination once in each repetition."""
    args = arguments()
    if args.one:
        clients, mode, rounds, runtime = args.one.split(",")
        run(int(clients), mode, int(rounds), runtime, args.output)
        return
    numbers = [int(number) for number in args.clients.split(",")]
    results: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    for mode, number, runtime in itertools.product(args.modes.split(","), numbers, args.runtimes.split(",")):
        if runtime != "flower" or number <= args.flower_most:
            results[runtime, mode, number] = []
    for _ in range(args.repeats):
        for (runtime, mode, number), runs in results.items():
            measured = measure(number, mode, args.rounds, runtime)
            runs.append(measured)
            shown = {key: round(value, 4) for key, value in measured.items()}
            print(runtime, mode, number, json.dumps(shown), flush=True)
    show(results)


if __name__ == "__main__":
    main()
