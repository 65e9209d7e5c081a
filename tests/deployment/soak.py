"""Half an hour of faults, one every 20 seconds, during runs, which must have the numbers of uninterrupted inline runs.

    PYTHONPATH=tests:tests/deployment python tests/deployment/soak.py [--minutes 30] [--every 20] [--rounds 8]

It needs nginx. The server and three sites are on loopback, each site behind a cable that can be cut. Their programs are
forked (warm.py), so that a busy machine can run them. The kinds of faults take turns. A run that a fault has ended is
started again with the same command, as an operator would do; when it is finished, the next seed follows. After the last
fault the present run is finished, and every run is compared with an inline run.
"""

import itertools
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from harness import NGINX
from outcomes import TOLERANCE, difference, last_line, need, options, statuses
from watched import SITES, Attacked, Watch

STARTS = 60  # a run may be started so many times
ATTACKER = "127.0.0.9"
SETTINGS = {"run.patience": 900, "run.wait_for_sites": 600, "run.timeout": 900}


class Line(Attacked):
    """The federation of attacks.py on loopback, every site behind a cable."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, target=False, nginx=True)
        self.runs = []
        for site in SITES:
            self.connect_by_cable(site)


def server_killed(federation: Line, site: str) -> None:
    federation.kill("server")
    federation.start("server", expect=None)


def clock_moved(federation: Line, site: str) -> None:
    """The SuperNode's clock is moved 3 s ahead, and the next time back."""
    file = federation.fault_file(site).with_suffix(".clock")
    if file.exists():
        file.unlink()
    else:
        file.write_text("3")


KINDS: dict[str, Callable[[Line, str], object]] = {  # in the order of their turns; the longest repair first
    "server killed": server_killed,
    "site killed": lambda federation, site: federation.kill(site),  # its supervisor starts it again
    "clock moved by 3 s": clock_moved,
    "proxy restarted": lambda federation, site: federation.end_nginx(),
    "link cut for 10 s": lambda federation, site: federation.cables[site].cut(10),
    "slow connections": lambda federation, site: federation.outsider("slow", 300, 15, ATTACKER),
    "oversized reply": lambda federation, site: federation.break_site("huge", site, round="any", megabytes=30),
}


class Faults(threading.Thread):
    """Causes one fault after the other, each at its time, even when the previous one is not repaired yet."""

    def __init__(self, federation: Line, every: float, end: float) -> None:
        super().__init__(daemon=True)
        self.federation, self.every, self.end = federation, every, end
        self.done: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(16)
        self._under_way: list[tuple[str, Future]] = []

    def run(self) -> None:
        at = time.monotonic() + self.every
        for name, site in zip(itertools.cycle(KINDS), itertools.cycle(SITES)):
            if at >= self.end:
                return
            time.sleep(max(at - time.monotonic(), 0.0))
            self._under_way.append((name, self._pool.submit(KINDS[name], self.federation, site)))
            self.done[name] += 1
            print(f"{time.strftime('%H:%M:%S')} {name} ({site})", flush=True)
            at += self.every

    def finish(self) -> list[str]:
        """Wait until everything is repaired; returns the errors of the repairs."""
        self.join()
        errors = [(name, work.exception(300)) for name, work in self._under_way]
        return [f"{name}: {error}" for name, error in errors if error is not None]


def runs_until(federation: Line, end: float, rounds: int) -> tuple[list[Path], Counter[str]]:
    """Run one seed after the other until the end; returns the runs' folders and the number of each exit code."""
    folders: list[Path] = []
    codes: Counter[str] = Counter()
    while not folders or time.monotonic() < end:
        seed = len(folders)
        for _ in range(STARTS):
            words = {**SETTINGS, "train.rounds": rounds, "run.seed": seed}
            process, folder = federation.attempt(f"seed{seed}", **words)
            _, said = process.communicate(timeout=3600)
            codes[str(process.returncode)] += 1
            words = f"{time.strftime('%H:%M:%S')} seed {seed}: exit {process.returncode} {last_line(said)[:160]}"
            print(words, flush=True)
            if process.returncode == 0:
                break
            time.sleep(2)
        need(process.returncode == 0, f"seed {seed} did not come to its end: {said[-400:]}")
        folders.append(folder.with_name(f"seed{seed}"))
    return folders, codes


def furthest(folder: Path, seed: int, rounds: int) -> float:
    """Largest difference from the unbroken inline run; WrongError for lost replies."""
    need(set(statuses(folder)) == {"ok"}, f"replies were lost: {set(statuses(folder))}")
    return difference(folder, **{"train.rounds": rounds, "run.seed": seed})


def main() -> int:
    """Do the test and print the results."""
    words = options(__doc__, minutes=30.0, every=20.0, rounds=8)
    need(NGINX, "needs nginx")
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        federation = Line(Path(name))
        with federation, Watch(federation) as watch:
            end = time.monotonic() + 60 * words.minutes
            faults = Faults(federation, words.every, end)
            faults.start()
            folders, codes = runs_until(federation, end, words.rounds)
            troubles, back = faults.finish(), watch.recovered()
        found = max(furthest(folder, seed, words.rounds) for seed, folder in enumerate(folders))
    print(f"\n{sum(faults.done.values())} faults in {words.minutes:g} minutes: {dict(faults.done)}")
    print(f"{len(folders)} runs of {words.rounds} rounds, exit codes of the starts {dict(codes)}; all sites in contact "
          f"{back:.0f} s after the end; nginx at most {watch.nginx:.0f} MB")  # fmt: skip
    print(f"largest difference from the unbroken inline runs: {found:.3g}; troubles: {troubles}")
    return 0 if found <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
