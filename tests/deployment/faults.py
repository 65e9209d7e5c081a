"""Causes real faults in federations on this machine, and prints a table of the results.

    PYTHONPATH=tests python tests/deployment/faults.py [--only WORD,WORD] [--lanes 3] [--timeout 60]

Three source sites on loopback, over TLS with keys, three rounds of FedAvg (FedBN where client state matters); the fault
strikes site-rot15 in round 2. "equal" means: last.safetensors and the accuracies and losses of rounds.csv are those of
the unbroken run, or of the federation reduced by the failed replies (both computed inline), to 1e-5. Ctrl-C or SIGTERM
ends it after the faults under way.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from harness import SITE, VICTIM, run_folder
from lane import Fault, Lane
from outcomes import CONTINUE, STOP, check_equal, finished, last_line, lost_replies, need, options, status, trial
from processes import until
from strangers import control_path, impostor, stranger


def lost(lane: Lane, output: Path, process: object, reason: str, stop: bool, **settings: object) -> str:
    """The victim's reply of round 2 is lost. With `continue` it is left out; with `stop` the same command continues."""
    said, folder = finished(process, int(stop)), run_folder(output)
    if stop:
        need(VICTIM in said and reason in said, said)
        return f"exit 1 naming {VICTIM}; {lane.again(output, **settings)}"
    need(reason in status(folder), f"clients.csv says {status(folder)!r}")
    need(VICTIM in (folder / "run.log").read_text(), "the log does not name it")
    return f"exit 0; {VICTIM}: {status(folder)[:70]}; {check_equal(folder, reduced=True)}"


def failing(lane: Lane, kind: str, reason: str, stop=False, seconds=0.0, late=0.0, **settings: object) -> str:
    """The victim's client app fails in round 2; a late reply comes so many seconds after `run.timeout`."""
    output = lane.fresh()
    lane.break_site(kind, seconds=lane.timeout + late if late else seconds)
    process = lane.begin(output, **(STOP if stop else CONTINUE), **settings)
    return lost(lane, output, process, reason, stop)


def state_wiped(lane: Lane) -> str:
    output = lane.fresh()
    lane.break_site("raise", round=3)
    finished(lane.begin(output, "fedbn", **STOP), 1)
    newest = max((lane.federation.kit(SITE) / "state" / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    for file in newest.rglob("*.safetensors"):
        file.unlink()
    said = finished(lane.begin(output, "fedbn", **STOP), 2)
    need(VICTIM in said and "Traceback" not in said, said)
    return f"exit 2: {last_line(said)[:110]}"


def site_killed(lane: Lane, stop: bool) -> str:
    """kill -9 of the SuperNode while it trains; its supervisor starts it again."""
    output, patient = lane.fresh(), {"run.timeout": 200}
    process = lane.begin_and_slow(output, 30, **(STOP if stop else CONTINUE), **patient)
    lane.kill(SITE)
    return lost(lane, output, process, "" if stop else " Unavailable", stop, **patient)


def site_restarted(lane: Lane, method: str) -> str:
    """stop.sh and start.sh between two rounds: the run waits for the site, which reads its state from its files."""
    output = lane.fresh()
    # Another site is slow in round 2, so that there is time to restart the victim, which has answered.
    other = lane.break_site("slow", "site-rot0", seconds=25)
    process = lane.begin(output, method, **STOP, **{"run.timeout": 300})
    until(lambda: not other.exists(), 400, "round 2")
    time.sleep(15)
    lane.stop(SITE)
    lane.start(SITE, expect=None)
    finished(process)
    return f"exit 0; {check_equal(run_folder(output, method), method)}"


def link_cut(lane: Lane, seconds: float) -> str:
    output = lane.fresh()
    process = lane.begin_and_slow(output, 10, **CONTINUE, **{"run.timeout": 300})
    lane.cables[SITE].cut(seconds)
    finished(process)
    folder = run_folder(output)
    reduced = bool(lost_replies(folder))
    need(reduced == (seconds > 60), f"lost: {lost_replies(folder)}")
    return f"exit 0; {VICTIM}: {status(folder)[:50]}; {check_equal(folder, reduced=reduced)}"


def server_dies(lane: Lane, how: str) -> str:
    """The SuperLink or only the server app is killed in round 2; the same command continues from the last round."""
    output = lane.fresh()
    process = lane.begin_and_slow(output, 10, **STOP)
    folder = run_folder(output)
    if how == "server app":
        os.kill(int((folder / ".lock").read_text().split()[1]), signal.SIGKILL)
    else:
        (lane.kill if how == "kill" else lane.stop)("server")
    if how != "stop":
        need("Traceback" not in finished(process, 1), "a traceback")
    if how != "server app":
        lane.start("server")
    process.communicate(timeout=900)
    if (folder / "summary.csv").is_file():
        return f"exit {process.returncode}; the run went on, {check_equal(folder)}"
    return f"exit {process.returncode}; {lane.again(output)}"


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
    finished(process, 130)
    return f"exit 130; {lane.again(output)}"


def site_missing(lane: Lane) -> str:
    lane.stop(SITE)
    try:
        started = time.monotonic()
        said = finished(lane.begin(lane.fresh(), **STOP, **{"run.wait_for_sites": 20}), 1)
        waited = time.monotonic() - started
    finally:
        lane.start(SITE, expect=None)
    need(f"no node for {VICTIM} within 20 s" in said, said)
    return f"exit 1 after {waited:.0f} s: {last_line(said)[-80:]}"


FAULTS: dict[str, Fault] = {
    "client raises (continue)": partial(failing, kind="raise", reason="told to raise"),
    "client raises (stop)": partial(failing, kind="raise", reason="told to raise", stop=True),
    "NaN in the reply (continue)": partial(failing, kind="nan", reason="NaN or infinite"),
    "wrong shapes (continue)": partial(failing, kind="shape", reason="expected float32"),
    "reply of another round (continue)": partial(failing, kind="other-round", reason="another message: round"),
    "reply of another run (continue)": partial(failing, kind="other-run", reason="another message: token"),
    "client hangs (continue)": partial(failing, kind="hang", reason="no reply within", seconds=10**6),
    "client hangs in C (continue)": partial(failing, kind="hang-in-c", reason="no reply within", seconds=10**6),
    "reply comes late (continue)": partial(failing, kind="late", reason="no reply within", late=8),
    "out of memory (continue)": partial(failing, kind="killed", reason="stopped responding", **{"run.timeout": 200}),
    "site killed in a round (continue)": partial(site_killed, stop=False),
    "site killed in a round (stop)": partial(site_killed, stop=True),
    "site restarted between rounds (FedAvg)": partial(site_restarted, method="fedavg"),
    "site restarted between rounds (FedBN)": partial(site_restarted, method="fedbn"),
    "client state wiped (FedBN)": state_wiped,
    "site missing at the start": site_missing,
    "link cut for 30 s (continue)": partial(link_cut, seconds=30),
    "link cut for 100 s (continue)": partial(link_cut, seconds=100),
    "SuperLink kill -9 and start": partial(server_dies, how="kill"),
    "SuperLink SIGTERM and start": partial(server_dies, how="stop"),
    "server app kill -9": partial(server_dies, how="server app"),
    "operator's command kill -9": operator_dies,
    "operator's Ctrl-C": operator_stops,
    "unregistered key": partial(stranger, kind="unregistered key"),
    "no key": partial(stranger, kind="no key"),
    "no CA certificate": partial(stranger, kind="no CA"),
    "plaintext": partial(stranger, kind="plaintext"),
    "site on the control path": control_path,
    "site that claims to be another": impostor,
}


def main() -> int:
    """Inject the faults, several federations at a time, and print the table."""
    words = options(__doc__, only="", lanes=3, timeout=60.0)
    names = [name for name in FAULTS if any(word in name for word in words.only.split(","))]
    lanes: SimpleQueue[Lane] = SimpleQueue()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def one(name: str) -> bool:
        lane = lanes.get()
        try:
            return trial(name, partial(FAULTS[name], lane))
        finally:
            lane.fault_file().unlink(missing_ok=True)
            lanes.put(lane)

    with contextlib.ExitStack() as stack:
        for _ in range(min(words.lanes, len(names))):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
            lanes.put(stack.enter_context(Lane(Path(folder), words.timeout)))
        pool = stack.enter_context(ThreadPoolExecutor(words.lanes))
        return int(not all(list(pool.map(one, names))))


if __name__ == "__main__":
    sys.exit(main())
