"""A killed sweep: its workers end too, the same command continues it, and the results are those of a complete one."""

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.resource_tracker import ResourceTracker
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import numbers

from fedsim.common.errors import UserError
from fedsim.results import rebuild_results
from fedsim.run.claim import is_claimed
from fedsim.runtime.launch import launch
from fedsim.sweep import Axes, budget, run_sweep
from fedsim.sweep.plan import plan_cells
from fedsim.sweep.pool import STOP_SECONDS, LocalPool, WorkerProcess, give, stop

FEDSIM = [sys.executable, "-c", "from fedsim.commands.cli import main; main()"]
SMALL = ("data.fraction=0.1", 'data.domains=["rot0", "rot15", "rot30"]', "run.device=cpu")


def start(output: Path, methods: str, targets: str, rounds: int, *more: str) -> subprocess.Popen:
    words = [part for word in (*SMALL, f"train.rounds={rounds}") for part in ("--set", word)]
    words += ["--methods", methods, "--targets", targets, "--cores-per-cell", "1", "--output", str(output)]
    return subprocess.Popen(
        [*FEDSIM, "sweep", "digits", *words, *more], text=True, stderr=subprocess.PIPE, start_new_session=True
    )


def unbroken(output: Path, methods: str, targets: str, rounds: int) -> Path:
    """Run the same cells one after the other in this process; returns the experiment's folder."""
    axes = Axes(methods.split(","), targets.split(","), [0])
    words = [*SMALL, f"train.rounds={rounds}", "run.threads=1", f"run.output={output}"]
    for cell in plan_cells("digits", axes, words, ""):
        launch(cell.experiment)
    rebuild_results(output / "digits")
    return output / "digits"


def assert_same_records(ours: Path, theirs: Path) -> None:
    """results.csv and all records are equal except columns of times; no run has left temporary files."""
    names = ["results.csv", *sorted(str(file.relative_to(theirs)) for file in theirs.rglob("*/*.csv"))]
    assert len(names) > 3
    for name in names:
        assert numbers(ours / name).equals(numbers(theirs / name)), name
    assert sorted(str(file.relative_to(ours)) for file in ours.rglob("*")) == sorted(
        str(file.relative_to(theirs)) for file in theirs.rglob("*")
    )


def rows(output: Path) -> int:
    return sum(max(file.read_bytes().count(b"\n") - 1, 0) for file in output.rglob("rounds.csv"))


def wait_until(done: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not done() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def workers(output: Path) -> dict[Path, int]:
    """{run's folder: id of the living process that holds it}; a lock file may also name a process that was killed."""
    texts = {file.parent: file.read_text() for file in output.rglob(".lock")}
    named = {folder: re.match(r"process (\d+) on", text) for folder, text in texts.items()}
    return {folder: int(found[1]) for folder, found in named.items() if found and alive(int(found[1]))}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")


@pytest.mark.slow
@needs_proc
def test_orphans_die_and_a_dead_worker_fails_its_cell_only(tmp_path):
    """The sweep is killed in a round, later a worker; each time the same command continues, with the same results."""
    whole = unbroken(tmp_path / "whole", "fedbn", "rot0,rot15", 30)
    broken = tmp_path / "broken"
    sweep = start(broken, "fedbn", "rot0,rot15", 30, "--jobs", "2")
    wait_until(lambda: rows(broken) >= 8 and len(workers(broken)) == 2, sweep)
    orphans = list(workers(broken).values())
    os.kill(sweep.pid, signal.SIGKILL)
    assert sweep.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in orphans) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(orphans) == 2
    assert not any(alive(pid) for pid in orphans)
    written = rows(broken)
    time.sleep(0.3)
    assert rows(broken) == written < 62

    sweep = start(broken, "fedbn", "rot0,rot15", 30, "--jobs", "2")
    wait_until(lambda: rows(broken) >= written + 2 and len(workers(broken)) == 2, sweep)
    folder, pid = next(iter(workers(broken).items()))
    os.kill(pid, signal.SIGKILL)
    said = sweep.communicate(timeout=300)[1]
    target = folder.parent.name
    assert sweep.returncode == 1
    assert f"failed: fedbn → {target} (seed 0): the worker process died (SIGKILL" in said
    assert "1 of 2 cells finished, 1 failed" in said

    sweep = start(broken, "fedbn", "rot0,rot15", 30, "--jobs", "1")
    assert sweep.wait(timeout=300) == 0, sweep.communicate()[1]
    assert_same_records(broken / "digits", whole)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("trial", range(4))
def test_killed_twice_at_random(trial, tmp_path):
    """SIGKILL is sent to the whole process group or only to the sweep, at any moment; results.csv is the same."""
    plan = ("fedavg,feddg-ga,csac", "rot0,rot30", 6)
    whole = unbroken(tmp_path / "whole", *plan)
    broken = tmp_path / "broken"
    started = time.monotonic()
    timed = start(tmp_path / "timed", *plan)
    assert timed.wait(timeout=300) == 0, timed.communicate()[1]
    seconds = time.monotonic() - started
    chance = random.Random(trial)
    for _ in range(2):
        sweep = start(broken, *plan)
        time.sleep(chance.uniform(0, 0.8 * seconds))
        if chance.random() < 0.5:
            os.killpg(sweep.pid, signal.SIGKILL)
        else:
            os.kill(sweep.pid, signal.SIGKILL)
        sweep.wait()
    sweep = start(broken, *plan)
    assert sweep.wait(timeout=300) == 0, sweep.communicate()[1]
    assert_same_records(broken / "digits", whole)


@needs_proc
def test_ctrl_c_ends_the_workers_and_leaves_every_cell_resumable(tmp_path):
    """A terminal sends the signal to the workers too, which leave the answer to the sweep."""
    words = [*SMALL, "train.rounds=40", f"run.output={tmp_path}"]
    cells = plan_cells("digits", Axes(["fedavg"], ["rot0", "rot15"], [0]), words, "")
    held = {}

    def update():
        if min(cell.round for cell in cells) >= 2:
            held.update(workers(tmp_path))
            for pid in held.values():
                os.kill(pid, signal.SIGINT)
            time.sleep(0.05)
            assert all(map(alive, held.values()))
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        LocalPool(cells, [budget.Reservation(1, ())] * 2).run(SimpleNamespace(update=update))
    assert len(held) == 2
    assert not any(map(alive, held.values()))
    assert not any(is_claimed(folder) for folder in held)
    assert not list(tmp_path.rglob("summary.csv"))


class Deaf:
    """A process that ends only when it is killed, and the clock that runs while it is waited for."""

    seconds = 0.0

    def __init__(self):
        self.living = True

    def is_alive(self):
        return self.living

    def join(self, timeout=None):
        assert timeout is not None or not self.living
        Deaf.seconds += timeout or 0.0

    def kill(self):
        self.living = False


def test_workers_that_do_not_end_are_waited_for_once(monkeypatch):
    """All have been told to end at the same time, so that ten seconds are enough for all of them together."""
    monkeypatch.setattr("fedsim.sweep.pool.time", SimpleNamespace(monotonic=lambda: Deaf.seconds), raising=False)
    pipe = SimpleNamespace(send=lambda message: None, close=lambda: None)
    workers = [WorkerProcess(budget.Reservation(1, ()), Deaf(), pipe) for _ in range(3)]
    stop(workers)
    assert Deaf.seconds == STOP_SECONDS
    assert not any(worker.process.is_alive() for worker in workers)


@pytest.mark.parametrize(
    ("error", "said"), [(OSError("AF_UNIX path too long"), "AF_UNIX path too long"), (EOFError(), "EOFError")]
)
def test_a_worker_that_cannot_be_started_is_one_line(error, said, monkeypatch):
    """The fork server's socket lies in TMPDIR, and its path may have 107 characters."""

    def refuse(process):
        raise error

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess._Popen", staticmethod(refuse))
    pool = LocalPool([SimpleNamespace()], [budget.Reservation(1, ()), budget.Reservation(1, ())])
    with pytest.raises(UserError, match=rf"no worker process can be started \({said}\); .* \(TMPDIR\)"):
        pool.run(None)


def interrupt_from_another_thread() -> None:
    """What the kernel does when the main thread has blocked the signal, made certain."""

    def interrupt():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    thread.join()


@pytest.mark.parametrize("interrupt", [lambda: signal.raise_signal(signal.SIGINT), interrupt_from_another_thread])
def test_ctrl_c_while_a_worker_starts_is_only_ctrl_c(interrupt, monkeypatch):
    """It waits until the worker is known, which then ends like the others; the resource tracker's start lets it by."""
    tracker = ResourceTracker()
    monkeypatch.setattr("multiprocessing.resource_tracker.ensure_running", tracker.ensure_running)

    def interrupted(process):
        tracker.ensure_running()
        interrupt()
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # a new process inherits it
        return SimpleNamespace(sentinel=None, poll=lambda: 0, wait=lambda timeout: 0)

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess._Popen", staticmethod(interrupted))
    worker = WorkerProcess(budget.Reservation(1, ()))
    with pytest.raises(KeyboardInterrupt):
        give(worker, SimpleNamespace())
    tracker._stop()
    assert worker.process is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    stop([worker, WorkerProcess(budget.Reservation(1, ()))])


def test_a_sweep_of_an_unguarded_script_is_refused_in_its_workers(monkeypatch):
    """A worker imports the script that started the sweep."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UserError, match='below `if __name__ == "__main__":`'):
        run_sweep("digits", Axes(["fedavg"], ["rot0"], [0]), budget.Budget(), dry_run=True)
