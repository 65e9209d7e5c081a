"""A run's folder has one writer, on one machine or several: what a killed process held is free, in time or at once."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from processes import until
from support import run_small, tiny_experiment

from fedsim.common.errors import ClaimedError, UserError
from fedsim.common.files import storage_time
from fedsim.records.callbacks import RunCallback
from fedsim.runs import claim as module
from fedsim.runs.claim import BEAT_SECONDS, GONE_SECONDS, claim, is_claimed
from fedsim.runs.plan import run_folder

HOLDER = """
import sys, time
from pathlib import Path
from fedsim.runs.claim import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_or_waits_until_the_first_is_killed(holder, tmp_path, monkeypatch):
    """The workers of a killed sweep need some time to end; within that time a new process waits."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "PATIENCE_SECONDS", 0.1)
        with pytest.raises(UserError, match=rf"\A.*process {holder.pid} on .*\Z"), claim(tmp_path / "run"):
            pass
    subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {holder.pid}"])
    with claim(tmp_path / "run"):
        assert holder.wait(timeout=10) == -signal.SIGKILL
        assert str(os.getpid()) in (tmp_path / "run" / ".lock").read_text()
    assert not list((tmp_path / "run").iterdir())


def test_what_a_killed_writer_left_is_removed(tmp_path):
    below = tmp_path / "predictions"
    below.mkdir()
    (below / ".round000001.safetensors.ab12cd34").write_text("text")
    for name in (".summary.csv.my0h5qh7", ".gone.lock.my0h5qh7", ".notes.markdown", "rounds.csv"):
        (tmp_path / name).write_text("text")
    with claim(tmp_path):
        left = sorted(file.name for file in tmp_path.iterdir())
        assert left == [".lock", ".notes.markdown", "predictions", "rounds.csv"]
        assert not list(below.iterdir())


def of_another_machine(folder, age=0.0):
    """A claim of another machine, whose last sign is so many seconds old by the storage's clock."""
    folder.mkdir(exist_ok=True)
    (folder / ".lock").write_text("process 12 on node7\n0000 ab12\n")
    os.utime(folder / ".lock", (storage_time(folder) - age,) * 2)


def test_a_machine_that_is_gone_loses_its_claim_after_a_stated_time(tmp_path, monkeypatch):
    """Only the age of its last sign can tell. The clock is the storage's, whatever this machine's own says."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    for hours in (-5, 0, 5):
        monkeypatch.setattr("fedsim.common.files.time.time", lambda hours=hours: time.monotonic() + 3600 * hours)
        of_another_machine(tmp_path / "run", GONE_SECONDS - 5)
        assert is_claimed(tmp_path / "run")
        with (
            pytest.raises(ClaimedError, match=r"\(process 12 on node7\).* is free 120 s after"),
            claim(tmp_path / "run"),
        ):
            pass
    of_another_machine(tmp_path / "run", GONE_SECONDS + 1)
    assert not is_claimed(tmp_path / "run")
    with claim(tmp_path / "run"):
        assert is_claimed(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_a_holder_gives_signs(tmp_path, monkeypatch):
    assert 3 * BEAT_SECONDS <= GONE_SECONDS
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    with claim(tmp_path):
        os.utime(tmp_path / ".lock", (1, 1))
        until(lambda: (tmp_path / ".lock").stat().st_mtime > 1)


def test_without_locks_a_dead_process_is_gone_after_that_time_too(holder, tmp_path, monkeypatch):
    """A claim that nobody has signed yet, because its maker was killed, is free after a second."""

    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    holder.kill()
    holder.wait()
    assert is_claimed(tmp_path / "run")
    monkeypatch.setattr(module, "GONE_SECONDS", 0.0)
    with claim(tmp_path / "run"):
        pass
    (tmp_path / ".lock").touch()
    assert is_claimed(tmp_path)
    os.utime(tmp_path / ".lock", (storage_time(tmp_path) - 1.5,) * 2)
    assert not is_claimed(tmp_path)


def test_of_many_that_take_over_one_wins(tmp_path, monkeypatch):
    """Also without the lock of this machine, as on different ones: at any time at most one claim stands."""
    monkeypatch.setattr(module, "alone", lambda folder: threading.Lock())
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    for _ in range(3):
        of_another_machine(tmp_path, GONE_SECONDS + 1)
        won, barrier = [], threading.Barrier(6)

        def take(won=won, barrier=barrier):
            barrier.wait()
            try:
                with claim(tmp_path) as own:
                    barrier.wait()
                    won.append(own.stands())
                    barrier.wait()
            except ClaimedError:
                barrier.wait()
                barrier.wait()

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won.count(True) == 1


@pytest.mark.parametrize("asleep_after", [0, 2])
def test_a_holder_that_slept_writes_nothing_more(tmp_path, asleep_after):
    """It finds the other's claim before its next record, and removes nothing of the other's."""
    experiment, seen = tiny_experiment(tmp_path), {}
    folder = run_folder(experiment)

    class Sleep(RunCallback):
        def on_round(self, row, clients):
            if row["round"] == asleep_after:
                of_another_machine(folder)
                seen.update({path: path.read_bytes() for path in folder.rglob("*") if path.is_file()})

    with pytest.raises(ClaimedError, match=r"was taken over by another process \(process 12 on node7\)"):
        run_small(experiment, Sleep())
    assert seen == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert is_claimed(folder)
