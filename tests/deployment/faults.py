"""Causes real faults in federations on this machine, and prints a table of the results.

    PYTHONPATH=tests python tests/deployment/faults.py [--only WORD,WORD] [--lanes 3] [--timeout 40]

Three source sites on loopback, over TLS with keys, three rounds of FedAvg (FedBN where client state matters); the fault
strikes site-rot15 in round 2. "equal" means: last.safetensors and the accuracies and losses of rounds.csv are those of
the unbroken run, or of the federation reduced by the failed replies (both computed inline), to 1e-5. Ctrl-C or SIGTERM
ends it after the faults under way, with the table of those that were tried.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

from breakdowns import link_cut, operator_dies, operator_stops, server_dies, site_killed, site_missing, site_restarted
from cable import Cable
from harness import Loopback, run_folder
from lanes import CONTINUE, SITE, STOP, VICTIM, Lane, Outcome, check_equal, need, status
from strangers import control_path, impostor, stranger
from support import free_ports


def failing(kind: str, reason: str, stop: bool = False, **more: float) -> Callable[[Lane], Outcome]:
    """The victim's reply of round 2 is lost. With `continue` it is left out; with `stop` the same command continues."""

    def fault(lane: Lane) -> Outcome:
        output = lane.fresh()
        seconds = lane.timeout + more["late"] if "late" in more else more.get("seconds", 0)
        lane.break_site(kind, seconds=seconds)
        timeout = {"run.timeout": more["timeout"]} if "timeout" in more else {}
        done = lane.run(output, **(STOP if stop else CONTINUE), **timeout)
        folder = run_folder(output)
        if not stop:
            need(done.returncode == 0, f"exit {done.returncode}: {done.stderr[-300:]}")
            need(reason in status(folder), f"clients.csv says {status(folder)!r}")
            need(VICTIM in (folder / "run.log").read_text(), "the log does not name it")
            return Outcome(f"exit 0; {VICTIM}: {status(folder)[:70]}; {check_equal(lane, folder, reduced=True)}", True)
        need(
            done.returncode == 1 and VICTIM in done.stderr and reason in done.stderr,
            f"{done.returncode}: {done.stderr}",
        )
        again = lane.run(output, **STOP)
        need(again.returncode == 0, f"again: exit {again.returncode}: {again.stderr[-300:]}")
        return Outcome(f"exit 1 naming {VICTIM}; the same command: exit 0, {check_equal(lane, folder)}", True)

    return fault


def state_wiped(lane: Lane) -> Outcome:
    """FedBN's own layers are removed from the site's disk between two rounds."""
    output = lane.fresh()
    lane.break_site("raise", round=3)
    need(lane.run(output, "fedbn", **STOP).returncode == 1, "round 3 did not fail")
    kit = lane.federation.federation.kit(SITE)
    newest = max((kit / "state" / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    for file in newest.rglob("*.safetensors"):
        file.unlink()
    done = lane.run(output, "fedbn", **STOP)
    need(done.returncode == 2 and VICTIM in done.stderr and "Traceback" not in done.stderr, done.stderr)
    return Outcome(f"exit 2: {done.stderr.strip().splitlines()[-1][:110]}", True)


FAULTS: dict[str, Callable[[Lane], Outcome]] = {
    "client raises (continue)": failing("raise", "told to raise"),
    "client raises (stop)": failing("raise", "told to raise", stop=True),
    "NaN in the reply (continue)": failing("nan", "NaN or infinite"),
    "wrong shapes (continue)": failing("shape", "expected float32"),
    "reply of another round (continue)": failing("other-round", "another message: round"),
    "reply of another run (continue)": failing("other-run", "another message: token"),
    "client hangs (continue)": failing("hang", "no reply within", seconds=10**6),
    "client hangs in C, holding the lock (continue)": failing("hang-in-c", "no reply within", seconds=10**6),
    "reply comes late (continue)": failing("late", "no reply within", late=8),
    "out of memory: client process killed (continue)": failing("killed", "stopped responding", timeout=200),
    "site killed in a round (continue)": site_killed(stop=False),
    "site killed in a round (stop)": site_killed(stop=True),
    "site restarted between rounds (FedAvg)": site_restarted("fedavg"),
    "site restarted between rounds (FedBN)": site_restarted("fedbn"),
    "client state wiped (FedBN)": state_wiped,
    "site missing at the start": site_missing,
    "link cut for 30 s (continue)": link_cut(30),
    "link cut for 100 s (continue)": link_cut(100),
    "SuperLink kill -9 and start": server_dies("kill"),
    "SuperLink SIGTERM and start": server_dies("stop"),
    "server app kill -9": server_dies("server app"),
    "operator's command kill -9": operator_dies,
    "operator's Ctrl-C": operator_stops,
    "unregistered key": stranger("unregistered key"),
    "no key": stranger("no key"),
    "no CA certificate": stranger("no CA"),
    "plaintext": stranger("plaintext"),
    "site on the control path": control_path,
    "site that claims to be another": impostor,
}


def open_lane(folder: Path, timeout: float) -> Lane:
    """A federation whose victim is connected through a cable that can be cut."""
    (control,) = free_ports(1)
    nginx = shutil.which("nginx", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
    settings = {"proxy": "nginx", "control": f"127.0.0.1:{control}"} if nginx else {}
    federation = Loopback(folder, target=False, settings=settings)
    cable = Cable(federation.federation.port)
    env = federation.federation.kit(SITE) / "site.env"
    env.write_text(env.read_text().replace(federation.federation.public_address, f"127.0.0.1:{cable.port}"))
    return Lane(federation, cable, timeout)


def print_table(rows: dict[str, tuple[str, float, bool]]) -> None:
    """Print the table as Markdown, in the order of FAULTS."""
    print("\n| fault | what happened | seconds | as it must |\n|---|---|---|---|")
    for name in [name for name in FAULTS if name in rows]:
        happened, seconds, holds = rows[name]
        print(f"| {name} | {' '.join(happened.split())[:260]} | {seconds:.0f} | {'yes' if holds else 'NO'} |")


def main() -> int:
    """Inject the faults, several federations at a time, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name contains one of these words")
    parser.add_argument("--lanes", type=int, default=3, help="federations at a time")
    parser.add_argument("--timeout", type=float, default=40, help="run.timeout; a busy machine needs more")
    words = parser.parse_args()
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in [name for name in FAULTS if any(word in name for word in words.only.split(","))]:
        waiting.put(name)
    rows: dict[str, tuple[str, float, bool]] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as root, ThreadPoolExecutor(words.lanes) as pool:

        def work(number: int) -> None:
            (Path(root) / f"lane{number}").mkdir()
            lane = open_lane(Path(root) / f"lane{number}", words.timeout)
            with lane.federation:
                while True:
                    try:
                        name = waiting.get_nowait()
                    except Empty:
                        break
                    started = time.monotonic()
                    try:
                        outcome = FAULTS[name](lane)
                    except Exception as error:
                        outcome = Outcome(f"{type(error).__name__}: {error}", False)
                    lane.federation.fault_file(SITE).unlink(missing_ok=True)
                    rows[name] = (outcome.happened, time.monotonic() - started, outcome.holds)
                    print(
                        f"{'ok ' if outcome.holds else 'BAD'} {name} ({rows[name][1]:.0f} s): {outcome.happened}",
                        flush=True,
                    )
            lane.cable.close()

        lanes = [pool.submit(work, number) for number in range(words.lanes)]

        def finish_early(number: int, frame: object) -> None:  # each lane completes its fault and stops its federation
            with contextlib.suppress(Empty):
                while True:
                    waiting.get_nowait()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, finish_early)
        for lane in lanes:
            lane.result()
    print_table(rows)
    return 0 if all(holds for _, _, holds in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
