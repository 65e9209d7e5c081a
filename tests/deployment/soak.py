"""Half an hour of faults, one every 20 seconds, during runs, which must have the numbers of uninterrupted inline runs.

    PYTHONPATH=tests:tests/deployment python tests/deployment/soak.py [--minutes 30] [--every 20] [--rounds 8]

It needs nginx. The server and three sites are on loopback, each site behind a cable that can be cut. Their programs are
forked (warm.py), so that a busy machine can run them. The kinds of faults take turns. A run that a fault has ended is
started again with the same command, as an operator would do; when it is finished, the next seed follows. After the last
fault the present run is finished, and every run is compared with an inline run.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
from cable import Cable
from harness import Loopback, is_alive, run_folder, run_inline, until
from lanes import COMPARED, TOLERANCE, need
from proxied import SITES, Federation, Watch
from safetensors.numpy import load_file
from support import free_ports

STARTS = 60  # a run may be started so many times
ATTACKER = "127.0.0.9"
SETTINGS = {"run.patience": 900, "run.wait_for_sites": 600, "run.timeout": 900}


class Line(Federation):
    """The federation of attacks.py without network namespaces."""

    def __init__(self, folder: Path) -> None:
        (control,) = free_ports(1)
        settings = {"proxy": "nginx", "control": f"127.0.0.1:{control}"}
        Loopback.__init__(self, folder, target=False, settings=settings)
        self.cables = [Cable(self.federation.port) for _ in SITES]
        for site, cable in zip(SITES, self.cables, strict=True):
            env = self.federation.kit(site) / "site.env"
            env.write_text(env.read_text().replace(self.federation.public_address, f"127.0.0.1:{cable.port}"))

    def inside(self, name: str) -> list[str]:
        return []

    def begin(self, name: str, rounds: int = 3, **settings: object) -> tuple[subprocess.Popen, Path]:
        words = {"train.rounds": rounds, "run.evaluate_target": "server", **SETTINGS, **settings}
        process = subprocess.Popen(
            self.command(self.folder / name, **words), cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        return process, run_folder(self.folder / name)


class Faults(threading.Thread):
    """Causes one fault after the other, each at its time, even when the previous one is not repaired yet."""

    def __init__(self, federation: Line, every: float, end: float) -> None:
        super().__init__(daemon=True)
        self.federation, self.every, self.end = federation, every, end
        self.done: Counter[str] = Counter()
        self.troubles: list[str] = []
        self._sites = itertools.cycle(range(len(SITES)))
        self._pool = ThreadPoolExecutor(16)
        self._under_way: list[tuple[str, Future]] = []

    def run(self) -> None:
        """Cause faults until the end."""
        turns = itertools.cycle(KINDS.items())
        at = time.monotonic() + self.every
        while at < self.end:
            time.sleep(max(at - time.monotonic(), 0.0))
            name, fault = next(turns)
            place = next(self._sites)
            self._under_way.append((name, self._pool.submit(fault, self.federation, place)))
            self.done[name] += 1
            print(f"{time.strftime('%H:%M:%S')} {name} ({SITES[place]})", flush=True)
            at += self.every

    def finish(self) -> None:
        """Wait until everything is repaired; errors of the repairs are in `troubles`."""
        self.join()
        for name, work in self._under_way:
            error = work.exception(300)
            if error is not None:
                self.troubles.append(f"{name}: {error}")


def site_killed(federation: Line, place: int) -> None:
    """kill -9 of a SuperNode; its supervisor starts it again."""
    federation.kill(SITES[place])


def link_cut(federation: Line, place: int) -> None:
    """The cable is cut for ten seconds."""
    federation.cables[place].cut()
    time.sleep(10)
    federation.cables[place].mend()


def proxy_restarted(federation: Line, place: int) -> None:
    """SIGTERM to nginx, then start.sh."""
    pid = int((federation.server_kit / "run" / "nginx-master.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    until(lambda: not is_alive(pid), 60, "end of nginx")
    federation.start("server", expect=None)


def server_killed(federation: Line, place: int) -> None:
    """kill -9 of the SuperLink with its server app, then start.sh."""
    federation.kill("server")
    federation.start("server", expect=None)


def slow_connections(federation: Line, place: int) -> None:
    """There are 300 slow connections at a time for 15 s."""
    federation.outsider("slow", "127.0.0.1", federation.federation.port, 300, 15, ATTACKER)


def oversized_reply(federation: Line, place: int) -> None:
    """The site's next reply with a model is 30 MB too large."""
    fault = {"kind": "huge", "round": "any", "once": True, "seconds": 0, "megabytes": 30}
    federation.fault_file(SITES[place]).write_text(json.dumps(fault))


def clock_moved(federation: Line, place: int) -> None:
    """The SuperNode's clock is moved 3 s ahead, and the next time back."""
    file = federation.fault_file(SITES[place]).with_suffix(".clock")
    if file.exists():
        file.unlink()
    else:
        file.write_text("3")


KINDS: dict[str, Callable[[Line, int], None]] = {  # in the order of their turns; those with the longest repair first
    "server killed": server_killed,
    "site killed": site_killed,
    "clock moved by 3 s": clock_moved,
    "proxy restarted": proxy_restarted,
    "link cut for 10 s": link_cut,
    "slow connections": slow_connections,
    "oversized reply": oversized_reply,
}


def runs_until(federation: Line, end: float, rounds: int) -> tuple[list[Path], Counter[str]]:
    """Run one seed after the other until the end; returns the runs' folders and the number of each exit code."""
    folders: list[Path] = []
    codes: Counter[str] = Counter()
    while not folders or time.monotonic() < end:
        seed = len(folders)
        for _ in range(STARTS):
            process, folder = federation.begin(f"seed{seed}", rounds, **{"run.seed": seed})
            _, said = process.communicate(timeout=3600)
            codes[str(process.returncode)] += 1
            last = (said.strip().splitlines() or [""])[-1]
            print(f"{time.strftime('%H:%M:%S')} seed {seed}: exit {process.returncode} {last[:160]}", flush=True)
            folder = folder.with_name(f"seed{seed}")
            if process.returncode == 0:
                break
            time.sleep(2)
        need(process.returncode == 0, f"seed {seed} did not come to its end: {said[-400:]}")
        folders.append(folder)
    return folders, codes


def difference(folder: Path, seed: int, rounds: int) -> float:
    """Largest difference from the unbroken inline run: records and final model; WrongError for lost replies."""
    clients = pd.read_csv(folder / "clients.csv")
    need(set(clients["status"]) == {"ok"}, f"replies were lost: {set(clients['status'])}")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        other = Path(name) / "inline"
        run_inline(other, **{"train.rounds": rounds, "run.seed": seed, "run.evaluate_target": "server"})
        inline = run_folder(other).with_name(f"seed{seed}")
        ours, theirs = (pd.read_csv(each / "rounds.csv")[COMPARED] for each in (folder, inline))
        need(len(ours) == len(theirs) == rounds + 1, f"{len(ours)} rows")
        models = [load_file(each / "last.safetensors") for each in (folder, inline)]
        furthest = [float(np.nanmax(np.abs(ours.to_numpy(float) - theirs.to_numpy(float))))]
        furthest += [float(np.abs(models[0][key] - models[1][key]).max()) for key in models[1] if models[1][key].size]
    return max(furthest)


def main() -> int:
    """Do the test and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=20, help="seconds between two faults")
    parser.add_argument("--rounds", type=int, default=8, help="of each run")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        federation = Line(Path(name))
        with federation, Watch(federation) as watch:
            end = time.monotonic() + 60 * words.minutes
            faults = Faults(federation, words.every, end)
            faults.start()
            folders, codes = runs_until(federation, end, words.rounds)
            faults.finish()
            back = watch.recovered()
        found = [difference(folder, seed, words.rounds) for seed, folder in enumerate(folders)]
    print(f"\n{sum(faults.done.values())} faults in {words.minutes:g} minutes: {dict(faults.done)}")
    print(f"{len(folders)} runs of {words.rounds} rounds, exit codes of the starts {dict(codes)}; all sites in contact "
          f"{back:.0f} s after the end; nginx at most {watch.nginx:.0f} MB")  # fmt: skip
    print(f"largest difference from the unbroken inline runs: {max(found):.3g}; troubles: {faults.troubles}")
    return 0 if max(found) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
