"""Faults injected for real into federations on this machine, and a table of what became of them.

    PYTHONPATH=tests python tests/deployment/faults.py [--only WORD] [--lanes 3] [--timeout 40]

Three source sites on loopback, over TLS with keys, three rounds of FedAvg (FedBN where client state matters); the fault
strikes site-rot15 in round 2. "equal" means: last.safetensors and the accuracies and losses of rounds.csv are those of
the unbroken run, or of the federation reduced by the failed replies (both computed inline), to 1e-5.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from cable import Cable
from harness import Loopback, free_ports, run_folder, until
from lanes import CONTINUE, SITE, STOP, VICTIM, Lane, Outcome, check_equal, lost_replies, need, status

from fedsim.deploy.certificates import write_site_key

# --- a client that fails ----------------------------------------------------------------------------------------------


def failing(kind: str, reason: str, stop: bool = False, **more: float) -> Callable[[Lane], Outcome]:
    """The victim's reply of round 2 is lost: left out with `continue`; with `stop` the same command goes on later."""

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
    """FedBN's own layers are gone from the site's disk between two rounds."""
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


# --- sites, links and servers that go ---------------------------------------------------------------------------------


def site_killed(stop: bool) -> Callable[[Lane], Outcome]:
    """kill -9 of the SuperNode while it trains; its supervisor starts it again."""

    def fault(lane: Lane) -> Outcome:
        output = lane.fresh()
        started = lane.break_site("slow", seconds=30)
        process = lane.begin(output, **{**(STOP if stop else CONTINUE), "run.timeout": 200})
        until(lambda: not started.exists(), 400, "round 2")
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
    """stop.sh and start.sh between two rounds: the run waits for the site, and its state comes from its files."""

    def fault(lane: Lane) -> Outcome:
        output = lane.fresh()
        # Another site is slow in round 2, so that the victim, which has answered, can be restarted meanwhile.
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
    """The site's line to the server is dead for some time while it trains."""

    def fault(lane: Lane) -> Outcome:
        output = lane.fresh()
        started = lane.break_site("slow", seconds=10)
        process = lane.begin(output, **{**CONTINUE, "run.timeout": 300})
        until(lambda: not started.exists(), 400, "round 2")
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
    """The SuperLink, or the server app alone, goes in round 2; the same command continues from the last round."""

    def fault(lane: Lane) -> Outcome:
        output = lane.fresh()
        started = lane.break_site("slow", seconds=10)
        process = lane.begin(output, **STOP)
        until(lambda: not started.exists(), 400, "round 2")
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
    """Ctrl-C."""
    output = lane.fresh()
    started = lane.break_site("slow", seconds=5)
    process = lane.begin(output, **STOP)
    until(lambda: not started.exists(), 400, "round 2")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=200)
    need(process.returncode == 130, f"{process.returncode}: {said}")
    again = lane.run(output, **STOP)
    need(again.returncode == 0, again.stderr)
    return Outcome(f"exit 130; the same command: exit 0, {check_equal(lane, run_folder(output))}", True)


def site_missing(lane: Lane) -> Outcome:
    """A site that was never started."""
    lane.federation.stop(SITE)
    try:
        started = time.monotonic()
        done = lane.run(lane.fresh(), **STOP, **{"run.wait_for_sites": 20})
        waited = time.monotonic() - started
    finally:
        lane.federation.start(SITE, expect=None)
    need(done.returncode == 1 and f"no node for {VICTIM} within 20 s" in done.stderr, done.stderr)
    return Outcome(f"exit 1 after {waited:.0f} s: {done.stderr.strip().splitlines()[-1][-80:]}", True)


# --- strangers --------------------------------------------------------------------------------------------------------


def stranger(kind: str) -> Callable[[Lane], Outcome]:
    """A SuperNode that must not get in."""

    def fault(lane: Lane) -> Outcome:
        federation, kit = lane.federation.federation, lane.federation.federation.kit(SITE)
        words = ["flower-supernode", "--superlink", federation.public_address, "--port", str(free_ports(1)[0])]
        trusted = ["--root-certificates", str(kit / "ca.crt")]
        with tempfile.TemporaryDirectory() as folder:
            write_site_key("stranger", Path(folder) / "key", Path(folder) / "key.pub")
            key = ["--auth-supernode-private-key", str(Path(folder) / "key")]
            own = ["--auth-supernode-private-key", str(kit / "key")]
            more = {
                "unregistered key": [*trusted, *key],
                "no key": trusted,
                "no CA": own,
                "plaintext": ["--insecure", "--max-retries", "1"],
            }
            environment = {**lane.federation.environment, "FLWR_HOME": folder}
            try:
                done = subprocess.run(
                    [*words, *more[kind]], env=environment, capture_output=True, text=True, timeout=240
                )
            except subprocess.TimeoutExpired:
                return Outcome("still trying, never connected", kind == "plaintext")
        said = done.stdout + done.stderr
        need(done.returncode != 0 and "SuperNode ID" not in said, said[-400:])
        lines = [line.strip() for line in said.splitlines() if "code" in line.lower() or "VERIFY" in line]
        return Outcome(f"refused, exit {done.returncode}: {' '.join(lines)[:90]}", True)

    return fault


def control_path(lane: Lane) -> Outcome:
    """A site that calls the control path at the server's public address, with all that its kit holds."""
    federation, kit = lane.federation.federation, lane.federation.federation.kit(SITE)
    need(federation.proxy == "nginx", "there is no nginx on this machine")
    with tempfile.TemporaryDirectory() as folder:
        connection = f'address = "{federation.public_address}"\nroot-certificates = "{kit / "ca.crt"}"\n'
        (Path(folder) / "config.toml").write_text(f"[superlink.site]\n{connection}")
        environment = {**lane.federation.environment, "FLWR_HOME": folder}
        words = ["flwr", "list", "site", "--format", "json"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    need('"runs"' not in done.stdout, done.stdout)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "403" in line or "error" in line.lower()]
    return Outcome(f"refused: {' '.join(lines)[:90]}", "403" in done.stdout + done.stderr)


def impostor(lane: Lane) -> Outcome:
    """A registered site whose owner writes another's domain into its site.env."""
    env = lane.federation.federation.kit("site-rot30") / "site.env"
    honest = env.read_text()
    lane.federation.stop("site-rot30")
    env.write_text(honest.replace("DOMAIN=rot30", "DOMAIN=rot0"))
    lane.federation.start("site-rot30", expect=None)
    try:
        done = lane.run(lane.fresh(), **STOP)
    finally:
        lane.federation.stop("site-rot30")
        env.write_text(honest)
        lane.federation.start("site-rot30", expect=None)
    need(done.returncode == 2 and "two nodes say that they are 'rot0'" in done.stderr, done.stderr)
    return Outcome(f"exit 2: {done.stderr.strip()[-70:]}", True)


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
    "site that poses as another": impostor,
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


def main() -> int:
    """Inject the faults, several federations at a time, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--lanes", type=int, default=3, help="federations at a time")
    parser.add_argument("--timeout", type=float, default=40, help="run.timeout; a busy machine needs more")
    words = parser.parse_args()
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in [name for name in FAULTS if words.only in name]:
        waiting.put(name)
    rows: dict[str, tuple[str, float, bool]] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as root, ThreadPoolExecutor(words.lanes) as pool:

        def work(number: int) -> None:
            (Path(root) / f"lane{number}").mkdir()
            lane = open_lane(Path(root) / f"lane{number}", words.timeout)
            with lane.federation:
                while not waiting.empty():
                    name = waiting.get()
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

        list(pool.map(work, range(words.lanes)))
    print("\n| fault | what happened | seconds | as it must |\n|---|---|---|---|")
    for name in [name for name in FAULTS if name in rows]:
        happened, seconds, holds = rows[name]
        print(f"| {name} | {' '.join(happened.split())[:260]} | {seconds:.0f} | {'yes' if holds else 'NO'} |")
    return 0 if all(holds for _, _, holds in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
