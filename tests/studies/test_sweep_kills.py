"""Killed and interrupted sweeps: their workers end too, and the same command continues them."""

import csv
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from multiprocessing.resource_tracker import ResourceTracker
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import is_alive, until

from fedsim.common.errors import UserError
from fedsim.common.workers import stop
from fedsim.runs.claim import is_claimed
from fedsim.studies import Axes, Budget, budget, loop, run_sweep
from fedsim.studies.plan import plan_cells
from fedsim.studies.pool import CellProcess, LocalPool

SMALL = ("data.fraction=0.1", 'data.domains=["rot0", "rot15", "rot30"]', "run.device=cpu")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")


def workers(output: Path) -> dict[Path, int]:
    """{run's folder: id of the living process that holds it}; a lock file may also name a process that was killed."""
    texts = {file.parent: file.read_text() for file in output.rglob(".lock")}
    named = {folder: re.match(r"process (\d+) on", text) for folder, text in texts.items()}
    return {folder: int(found[1]) for folder, found in named.items() if found and is_alive(int(found[1]))}


@pytest.mark.slow
@needs_proc
def test_orphans_die(tmp_path):
    words = shlex.split("-m fedsim sweep digits --methods fedbn --targets rot0,rot15 --cores-per-cell 1 --jobs 2")
    words += [part for word in (*SMALL, "train.rounds=30") for part in ("--set", word)]

    def rows():
        return sum(max(file.read_bytes().count(b"\n") - 1, 0) for file in tmp_path.rglob("rounds.csv"))

    sweep = subprocess.Popen([sys.executable, *words, "--output", str(tmp_path)], start_new_session=True)
    until(lambda: rows() >= 8 and len(workers(tmp_path)) == 2, 300)
    orphans = list(workers(tmp_path).values())
    sweep.kill()
    sweep.wait()
    until(lambda: not any(map(is_alive, orphans)), 300)
    written = rows()
    time.sleep(0.3)
    assert rows() == written < 62


@needs_proc
def test_a_dead_worker_fails_its_cell_only_and_ctrl_c_leaves_the_others_resumable(tmp_path):
    """A terminal sends Ctrl-C to the workers too, which leave the answer to the sweep."""
    words = [*SMALL, "train.rounds=40", f"run.output={tmp_path}"]
    cells = plan_cells("digits", Axes(["fedavg"], ["rot0", "rot15", "rot30"], [0]), words, "")
    held = {}

    def update():
        first = workers(tmp_path).get(cells[0].folder)  # a killed one is gone before the sweep notices it
        if first and cells[0].round >= 1:
            os.kill(first, signal.SIGKILL)
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
    assert [pid for pid in held.values() if is_alive(pid)] + [folder for folder in held if is_claimed(folder)] == []
    assert not list(tmp_path.rglob("summary.csv"))


def test_a_worker_serves_cells_until_the_end_and_results_of_a_killed_sweep_are_those_of_an_unbroken_one(tmp_path):
    """Methods that are not given in the order of their names: rows are appended, and sorted once at the end."""
    words = ["train.rounds=1", "run.processes=1", "run.device=cpu"]
    axes = Axes(["scaffold", "fedavg"], ["hungary", "cleveland"], [1, 0])
    pids = set()

    class Noted(SimpleNamespace):
        def update(self):
            pids.update(worker.process.pid for worker in pool.workers if worker.process)

    def cells_in(folder):
        return plan_cells("hospitals", axes, [*words, f"run.output={folder}"], "")

    cells = cells_in(tmp_path / "whole")
    pool = LocalPool(cells, [budget.Reservation(1, ())])
    pool.run(Noted())
    assert [cell.state for cell in cells] == ["finished"] * 8
    assert len(pids) == 1
    file = tmp_path / "whole" / "hospitals" / "results.csv"
    assert len(file.read_text().splitlines()) == 9
    unsorted = file.read_bytes()
    loop.tidy(cells)
    assert sorted(unsorted.splitlines()) == sorted(file.read_bytes().splitlines())
    assert unsorted != file.read_bytes()

    killed = cells_in(tmp_path / "killed")
    LocalPool(killed[:3], [budget.Reservation(1, ())]).run(Noted())
    torn = tmp_path / "killed" / "hospitals" / "results.csv"
    torn.write_bytes(torn.read_bytes()[:-40])
    assert not run_sweep(
        "hospitals", axes, budget.Budget(jobs=1), overrides=[*words, f"run.output={tmp_path / 'killed'}"]
    )
    assert row_keys(torn) == row_keys(file)


def row_keys(file):
    """Everything of results.csv but seconds, which no two runs have alike."""
    rows = list(csv.DictReader(file.read_text().splitlines()))
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


@pytest.mark.parametrize("error", [OSError("AF_UNIX path too long"), EOFError()])
def test_a_worker_that_cannot_be_started_is_one_line(error, monkeypatch):
    """The fork server's socket lies in TMPDIR, and its path may have 107 characters."""

    def refuse(process):
        raise error

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess._Popen", staticmethod(refuse))
    cells, said = [SimpleNamespace(folder=Path("/nowhere"), should_prune=None)], str(error) or "EOFError"
    pool = LocalPool(cells, [budget.Reservation(1, ())] * 2)
    with pytest.raises(UserError, match=rf"no worker process can be started \({said}\); .* \(TMPDIR\)"):
        pool.run(None)


def test_ctrl_c_while_a_worker_starts_is_only_ctrl_c(monkeypatch):
    """It waits until the worker is known, which then ends like the others; the resource tracker's start lets it by."""
    tracker = ResourceTracker()
    monkeypatch.setattr("multiprocessing.resource_tracker.ensure_running", tracker.ensure_running)

    def interrupted(process):
        tracker.ensure_running()
        signal.raise_signal(signal.SIGINT)
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # a new process inherits it
        return SimpleNamespace(sentinel=None, poll=lambda: 0, wait=lambda timeout: 0)

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess._Popen", staticmethod(interrupted))
    worker = CellProcess(budget.Reservation(1, ()))
    with pytest.raises(KeyboardInterrupt):
        worker.give(SimpleNamespace())
    tracker._stop()
    assert worker.process is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    stop([worker, CellProcess(budget.Reservation(1, ()))])


def test_a_sweep_of_an_unguarded_script_is_refused_in_its_workers(monkeypatch):
    """A worker imports the script that started the sweep."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UserError, match='below `if __name__ == "__main__":`'):
        run_sweep("digits", Axes(["fedavg"], ["rot0"], [0]), budget.Budget(), dry_run=True)


@pytest.fixture
def reserved(monkeypatch):
    """Function: (a wish, cores and GPUs of the machine, device, threads) -> (cores, GPUs of each cell)."""

    def reserve(wish, cores, gpus="", device="auto", threads=1):
        monkeypatch.setattr(budget, "free_cores", lambda: cores)
        monkeypatch.setattr(budget, "visible_gpus", lambda: list(gpus))
        found = budget.local_reservations(wish, device, threads)
        return [each.cores for each in found], ["".join(each.gpus) for each in found]

    return reserve


@pytest.mark.parametrize(("wish", "cores", "gpus", "expected", "devices"), [
    (Budget(), 4, "", [1, 1, 1, 1], [""] * 4),
    (Budget(jobs=2), 4, "", [1, 1], [""] * 2),  # the same threads, so the same numbers, whatever runs next to it
    (Budget(jobs=8), 4, "", [1] * 8, [""] * 8),  # more cells than cores is the user's choice
    (Budget(jobs=8, cores=2), 4, "", [2, 2], [""] * 2),  # but not more cores than there are
    (Budget(), 4, "ab", [1, 1, 1, 1], list("abab")),  # GPUs are shared evenly
    (Budget(gpus=1), 8, "ab", [1, 1], list("ab")),
    (Budget(gpus=0.3, cores=2), 4, "a", [2, 2], list("aa")),
    (Budget(gpus=2), 8, "abcde", [1, 1], ["ab", "cd"]),  # no device is given twice
])  # fmt: skip
def test_reservations_keep_the_budget(reserved, wish, cores, gpus, expected, devices):
    assert reserved(wish, cores, gpus) == (expected, devices)


@pytest.mark.parametrize(("wish", "device", "gpus", "said"), [
    (Budget(cores=9), "auto", "", "has 8 cores"),
    (Budget(gpus=0.5), "auto", "", "no CUDA device"),
    (Budget(gpus=0.5), "cpu", "a", "run.device is 'cpu'"),
    (Budget(gpus=3), "auto", "ab", "whole number up to 2"),
])  # fmt: skip
def test_what_does_not_fit_is_said(reserved, wish, device, gpus, said):
    with pytest.raises(UserError, match=said):
        reserved(wish, 8, gpus, device)


def test_devices_are_the_visible_ones_and_threads_those_of_the_settings(monkeypatch, reserved):
    """The devices in the sweep's CUDA_VISIBLE_DEVICES are divided; no others are used."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert budget.visible_gpus() == ["5", "GPU-abc"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert budget.visible_gpus() == ["0", "1"]
    assert reserved(Budget(), 8, "ab", device="cpu")[1] == [""] * 8
    assert [reserved(wish, 8, "ab", threads=3)[0] for wish in (Budget(), Budget(jobs=4))] == [[3] * 2, [3] * 4]
