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
import signal
import sys
import tempfile
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from harness import SITE, VICTIM, run_folder
from lane import Fault, Lane
from outcomes import CONTINUE, STOP, check_equal, last_line, lost_replies, need, status
from processes import until
from strangers import control_path, impostor, stranger


def failing(kind: str, reason: str, stop: bool = False, **more: float) -> Fault:
    """The victim's reply of round 2 is lost. With `continue` it is left out; with `stop` the same command continues."""

    def fault(lane: Lane) -> str:
        output = lane.fresh()
        lane.break_site(kind, seconds=lane.timeout + more["late"] if "late" in more else more.get("seconds", 0))
        timeout = {"run.timeout": more["timeout"]} if "timeout" in more else {}
        said = lane.end(lane.begin(output, **(STOP if stop else CONTINUE), **timeout), int(stop))
        folder = run_folder(output)
        if stop:
            need(VICTIM in said and reason in said, said)
            return f"exit 1 naming {VICTIM}; {lane.again(output)}"
        need(reason in status(folder), f"clients.csv says {status(folder)!r}")
        need(VICTIM in (folder / "run.log").read_text(), "the log does not name it")
        return f"exit 0; {VICTIM}: {status(folder)[:70]}; {check_equal(folder, reduced=True)}"

    return fault


def state_wiped(lane: Lane) -> str:
    output = lane.fresh()
    lane.break_site("raise", round=3)
    lane.end(lane.begin(output, "fedbn", **STOP), 1)
    newest = max((lane.federation.kit(SITE) / "state" / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    for file in newest.rglob("*.safetensors"):
        file.unlink()
    said = lane.end(lane.begin(output, "fedbn", **STOP), 2)
    need(VICTIM in said and "Traceback" not in said, said)
    return f"exit 2: {last_line(said)[:110]}"


def site_killed(stop: bool) -> Fault:
    """kill -9 of the SuperNode while it trains; its supervisor starts it again."""

    def fault(lane: Lane) -> str:
        output = lane.fresh()
        process = lane.begin_and_slow(output, 30, **{**(STOP if stop else CONTINUE), "run.timeout": 200})
        lane.kill(SITE)
        said, folder = lane.end(process, int(stop)), run_folder(output)
        if stop:
            need(VICTIM in said, said)
            return f"exit 1 naming {VICTIM}; {lane.again(output, **{'run.timeout': 200})}"
        need("Node Unavailable" in status(folder), status(folder))
        return f"exit 0; {VICTIM}: {status(folder)[:60]}; {check_equal(folder, reduced=True)}"

    return fault


def site_restarted(method: str) -> Fault:
    """stop.sh and start.sh between two rounds: the run waits for the site, which reads its state from its files."""

    def fault(lane: Lane) -> str:
        output = lane.fresh()
        # Another site is slow in round 2, so that there is time to restart the victim, which has answered.
        other = lane.break_site("slow", "site-rot0", seconds=25)
        process = lane.begin(output, method, **STOP, **{"run.timeout": 300})
        until(lambda: not other.exists(), 400, "round 2")
        time.sleep(15)
        lane.stop(SITE)
        lane.start(SITE, expect=None)
        lane.end(process)
        return f"exit 0; {check_equal(run_folder(output, method), method)}"

    return fault


def link_cut(seconds: float) -> Fault:
    def fault(lane: Lane) -> str:
        output = lane.fresh()
        process = lane.begin_and_slow(output, 10, **{**CONTINUE, "run.timeout": 300})
        lane.cables[SITE].cut(seconds)
        lane.end(process)
        folder = run_folder(output)
        reduced = bool(lost_replies(folder))
        need(reduced == (seconds > 60), f"lost: {lost_replies(folder)}")
        return f"exit 0; {VICTIM}: {status(folder)[:50]}; {check_equal(folder, reduced=reduced)}"

    return fault


def server_dies(how: str) -> Fault:
    """The SuperLink or only the server app is killed in round 2; the same command continues from the last round."""

    def fault(lane: Lane) -> str:
        output = lane.fresh()
        process = lane.begin_and_slow(output, 10, **STOP)
        folder = run_folder(output)
        if how == "server app":
            os.kill(int((folder / ".lock").read_text().split()[1]), signal.SIGKILL)
        else:
            (lane.kill if how == "kill" else lane.stop)("server")
        if how != "stop":
            need("Traceback" not in lane.end(process, 1), "a traceback")
        if how != "server app":
            lane.start("server")
        process.communicate(timeout=900)
        if (folder / "summary.csv").is_file():
            return f"exit {process.returncode}; the run went on, {check_equal(folder)}"
        return f"exit {process.returncode}; {lane.again(output)}"

    return fault


def operator_dies(lane: Lane) -> str:
    """kill -9 of `fedsim run`: the run goes on, and the same command follows it."""
    output = lane.fresh()
    process = lane.begin(output, **STOP)
    folder = run_folder(output)
    until((folder / "rounds.csv").is_file, 400, "round 0")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before, followed = (folder / "deployment.json").read_text(), lane.again(output)
    need((folder / "deployment.json").read_text() == before, "another run was started")
    return f"the run goes on and is followed: {followed}"


def operator_stops(lane: Lane) -> str:
    output = lane.fresh()
    process = lane.begin_and_slow(output, 5, **STOP)
    os.killpg(process.pid, signal.SIGINT)
    lane.end(process, 130)
    return f"exit 130; {lane.again(output)}"


def site_missing(lane: Lane) -> str:
    lane.stop(SITE)
    try:
        started = time.monotonic()
        said = lane.end(lane.begin(lane.fresh(), **STOP, **{"run.wait_for_sites": 20}), 1)
        waited = time.monotonic() - started
    finally:
        lane.start(SITE, expect=None)
    need(f"no node for {VICTIM} within 20 s" in said, said)
    return f"exit 1 after {waited:.0f} s: {last_line(said)[-80:]}"


FAULTS: dict[str, Fault] = {
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


def one(name: str, lanes: "SimpleQueue[Lane]") -> tuple[str, float, bool]:
    """(what happened, seconds, whether it is what must happen) of a fault in a federation that is free."""
    lane, started, holds = lanes.get(), time.monotonic(), True
    try:
        happened = FAULTS[name](lane)
    except Exception as error:
        happened, holds = f"{type(error).__name__}: {error}", False
    lane.fault_file().unlink(missing_ok=True)
    lanes.put(lane)
    print(f"{'ok ' if holds else 'BAD'} {name}: {happened}", flush=True)
    return happened, time.monotonic() - started, holds


def main() -> int:
    """Inject the faults, several federations at a time, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name contains one of these words")
    parser.add_argument("--lanes", type=int, default=3, help="federations at a time")
    parser.add_argument("--timeout", type=float, default=40, help="run.timeout; a busy machine needs more")
    words = parser.parse_args()
    names = [name for name in FAULTS if any(word in name for word in words.only.split(","))]
    lanes: SimpleQueue[Lane] = SimpleQueue()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        for number in range(min(words.lanes, len(names))):
            (root / f"lane{number}").mkdir()
            lanes.put(stack.enter_context(Lane(root / f"lane{number}", words.timeout)))
        pool = stack.enter_context(ThreadPoolExecutor(words.lanes))
        rows = {name: pool.submit(one, name, lanes) for name in names}
        for number in (signal.SIGINT, signal.SIGTERM):  # each federation completes its fault
            signal.signal(number, lambda *words: pool.shutdown(wait=False, cancel_futures=True))
        tried, failed = [], False
        for name, row in rows.items():
            with contextlib.suppress(CancelledError):
                happened, seconds, holds = row.result()
                failed |= not holds
                tried.append((name, " ".join(happened.split())[:260], f"{seconds:.0f}", "yes" if holds else "NO"))
    print("\n| fault | what happened | seconds | as it must |\n|---|---|---|---|")
    for cells in tried:
        print(f"| {' | '.join(cells)} |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
