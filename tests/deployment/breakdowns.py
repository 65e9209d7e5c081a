"""Sites, links, servers and operators that fail in the middle of a run."""

import json
import os
import signal
import time
from collections.abc import Callable

from harness import run_folder, until
from lanes import CONTINUE, SITE, STOP, VICTIM, Lane, Outcome, check_equal, lost_replies, need, status


def site_killed(stop: bool) -> Callable[[Lane], Outcome]:
    """kill -9 of the SuperNode while it trains; its supervisor starts it again."""

    def fault(lane: Lane) -> Outcome:
        output = lane.fresh()
        process = lane.begin_and_slow(output, 30, **{**(STOP if stop else CONTINUE), "run.timeout": 200})
        lane.federation.kill(SITE)
        _, said = process.communicate(timeout=1500)
        folder = run_folder(output)
        if not stop:
            need(process.returncode == 0, said)
            need("Node Unavailable" in status(folder), status(folder))
            return Outcome(f"exit 0; {VICTIM}: {status(folder)[:60]}; {check_equal(lane, folder, reduced=True)}", True)
        need(process.returncode == 1 and VICTIM in said, said)
        again = lane.run(output, **{**STOP, "run.timeout": 200})
        need(again.returncode == 0, again.stderr)
        return Outcome(f"exit 1 naming {VICTIM}; the same command waits for it: {check_equal(lane, folder)}", True)

    return fault


def site_restarted(method: str) -> Callable[[Lane], Outcome]:
    """stop.sh and start.sh between two rounds: the run waits for the site, which reads its state from its files."""

    def fault(lane: Lane) -> Outcome:
        output = lane.fresh()
        # Another site is slow in round 2, so that there is time to restart the victim, which has answered.
        other = lane.federation.fault_file("site-rot0")
        other.write_text(json.dumps({"kind": "slow", "round": 2, "once": True, "seconds": 25}))
        process = lane.begin(output, method, **STOP, **{"run.timeout": 300})
        until(lambda: not other.exists(), 400, "round 2")
        time.sleep(15)
        lane.federation.stop(SITE)
        lane.federation.start(SITE, expect=None)
        _, said = process.communicate(timeout=1500)
        need(process.returncode == 0, said)
        return Outcome(f"exit 0; {check_equal(lane, run_folder(output, method), method)}", True)

    return fault


def link_cut(seconds: float) -> Callable[[Lane], Outcome]:
    """The site's link to the server is cut for some time while the site trains."""

    def fault(lane: Lane) -> Outcome:
        output = lane.fresh()
        process = lane.begin_and_slow(output, 10, **{**CONTINUE, "run.timeout": 300})
        lane.cable.cut()
        time.sleep(seconds)
        lane.cable.mend()
        _, said = process.communicate(timeout=1500)
        need(process.returncode == 0, said)
        folder = run_folder(output)
        reduced = bool(lost_replies(folder))
        need(reduced == (seconds > 60), f"lost: {lost_replies(folder)}")
        return Outcome(f"exit 0; {VICTIM}: {status(folder)[:50]}; {check_equal(lane, folder, reduced=reduced)}", True)

    return fault


def server_dies(how: str) -> Callable[[Lane], Outcome]:
    """The SuperLink or only the server app is killed in round 2; the same command continues from the last round."""

    def fault(lane: Lane) -> Outcome:
        output = lane.fresh()
        process = lane.begin_and_slow(output, 10, **STOP)
        folder = run_folder(output)
        if how == "server app":
            os.kill(int((folder / ".lock").read_text().split()[1]), signal.SIGKILL)
        elif how == "kill":
            lane.federation.kill("server")
        else:
            lane.federation.stop("server")
        first = None
        if how != "stop":
            _, said = process.communicate(timeout=600)
            first = process.returncode
            need(first == 1 and "Traceback" not in said, f"{first}: {said}")
        if how != "server app":
            lane.federation.start("server")
        if first is None:
            _, said = process.communicate(timeout=900)
            first = process.returncode
        finished = (folder / "summary.csv").is_file()
        if not finished:
            again = lane.run(output, **STOP)
            need(again.returncode == 0, again.stderr)
        later = "the run went on" if finished else "the same command: exit 0"
        return Outcome(f"exit {first}; {later}, {check_equal(lane, folder)}", True)

    return fault


def operator_dies(lane: Lane) -> Outcome:
    """kill -9 of `fedsim run`: the run goes on, and the same command follows it."""
    output = lane.fresh()
    process = lane.begin(output, **STOP)
    folder = run_folder(output)
    until(lambda: (folder / "rounds.csv").is_file(), 400, "round 0")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = (folder / "deployment.json").read_text()
    again = lane.run(output, **STOP)
    need(again.returncode == 0 and (folder / "deployment.json").read_text() == before, again.stderr)
    return Outcome(f"the run goes on, the same command follows it: exit 0, {check_equal(lane, folder)}", True)


def operator_stops(lane: Lane) -> Outcome:
    """The operator presses Ctrl-C."""
    output = lane.fresh()
    process = lane.begin_and_slow(output, 5, **STOP)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=200)
    need(process.returncode == 130, f"{process.returncode}: {said}")
    again = lane.run(output, **STOP)
    need(again.returncode == 0, again.stderr)
    return Outcome(f"exit 130; the same command: exit 0, {check_equal(lane, run_folder(output))}", True)


def site_missing(lane: Lane) -> Outcome:
    """A site is never started."""
    lane.federation.stop(SITE)
    try:
        started = time.monotonic()
        done = lane.run(lane.fresh(), **STOP, **{"run.wait_for_sites": 20})
        waited = time.monotonic() - started
    finally:
        lane.federation.start(SITE, expect=None)
    need(done.returncode == 1 and f"no node for {VICTIM} within 20 s" in done.stderr, done.stderr)
    return Outcome(f"exit 1 after {waited:.0f} s: {done.stderr.strip().splitlines()[-1][-80:]}", True)
