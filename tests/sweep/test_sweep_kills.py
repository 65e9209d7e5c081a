"""Killed and interrupted sweeps: their workers end too, and the same command continues them."""

import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.resource_tracker import ResourceTracker
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import is_alive, until
from support import numbers

from fedsim.common.errors import UserError
from fedsim.run.claim import is_claimed
from fedsim.sweep import Axes, budget, run_sweep
from fedsim.sweep.plan import plan_cells
from fedsim.sweep.pool import STOP_SECONDS, LocalPool, WorkerProcess, give, stop

SMALL = ("data.fraction=0.1", 'data.domains=["rot0", "rot15", "rot30"]', "run.device=cpu")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")


def workers(output: Path) -> dict[Path, int]:
    """{run's folder: id of the living process that holds it}; a lock file may also name a process that was killed."""
    texts = {file.parent: file.read_text() for file in output.rglob(".lock")}
    named = {folder: re.match(r"process (\d+) on", text) for folder, text in texts.items()}
    return {folder: int(found[1]) for folder, found in named.items() if found and is_alive(int(found[1]))}


@pytest.mark.slow
@needs_proc
def test_orphans_die_and_the_same_command_continues(tmp_path):
    """After `kill -9` of a sweep, its workers write nothing more; the records are then those of an unbroken one."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = shlex.split("-m fedsim sweep digits --methods fedbn --targets rot0,rot15 --cores-per-cell 1 --jobs 2")
    words += [part for word in (*SMALL, "train.rounds=30") for part in ("--set", word)]

    def start(output):
        return subprocess.Popen([sys.executable, *words, "--output", str(output)], start_new_session=True)

    def rows():
        return sum(max(file.read_bytes().count(b"\n") - 1, 0) for file in broken.rglob("rounds.csv"))

    sweep = start(broken)
    until(lambda: rows() >= 8 and len(workers(broken)) == 2, 300)
    orphans = list(workers(broken).values())
    sweep.kill()
    sweep.wait()
    until(lambda: not any(map(is_alive, orphans)), 300)
    written = rows()
    time.sleep(0.3)
    assert rows() == written < 62
    assert start(broken).wait(timeout=300) == start(whole).wait(timeout=300) == 0
    files = [sorted(str(file.relative_to(folder)) for file in folder.rglob("*")) for folder in (broken, whole)]
    assert files[0] == files[1]
    for name in (name for name in files[0] if name.endswith(".csv")):
        assert numbers(broken / name).equals(numbers(whole / name)), name


@needs_proc
def test_a_dead_worker_fails_its_cell_only_and_ctrl_c_leaves_the_others_resumable(tmp_path):
    """A terminal sends Ctrl-C to the workers too, which leave the answer to the sweep."""
    words = [*SMALL, "train.rounds=40", f"run.output={tmp_path}"]
    cells = plan_cells("digits", Axes(["fedavg"], ["rot0", "rot15", "rot30"], [0]), words, "")
    held = {}

    def update():
        if cells[0].state == "running" and cells[0].round >= 1:
            os.kill(workers(tmp_path)[cells[0].folder], signal.SIGKILL)
        if min(cell.round for cell in cells[1:]) >= 2:
            held.update(workers(tmp_path))
            for pid in held.values():
                os.kill(pid, signal.SIGINT)
            time.sleep(0.05)
            assert all(map(is_alive, held.values()))
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        LocalPool(cells, [budget.Reservation(1, ())] * 2).run(SimpleNamespace(update=update))
    assert (cells[0].state, cells[0].reason) == ("failed", "the worker process died (SIGKILL, out of memory?)")
    assert set(held) == {cell.folder for cell in cells[1:]}
    assert not any(map(is_alive, held.values()))
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


@pytest.mark.parametrize(("error", "said"), [
    (OSError("AF_UNIX path too long"), "AF_UNIX path too long"), (EOFError(), "EOFError"),
])  # fmt: skip
def test_a_worker_that_cannot_be_started_is_one_line(error, said, monkeypatch):
    """The fork server's socket lies in TMPDIR, and its path may have 107 characters."""

    def refuse(process):
        raise error

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess._Popen", staticmethod(refuse))
    pool = LocalPool(
        [SimpleNamespace(folder=Path("/nowhere"), doomed=None)], [budget.Reservation(1, ()), budget.Reservation(1, ())]
    )
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
