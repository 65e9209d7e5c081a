"""A run's folder has one writer: a second process is refused in one line; the lock of a killed process is released."""

import os
import signal
import subprocess
import sys

import pytest
from support import run_small, tiny_experiment

from fedsim.common.errors import UserError
from fedsim.run import claim as module
from fedsim.run.claim import claim
from fedsim.run.plan import run_folder

HOLDER = """
import sys, time
from pathlib import Path
from fedsim.run.claim import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path/run."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_or_waits_until_the_first_is_killed(holder, tmp_path, monkeypatch):
    """The workers of a killed sweep need some time to end; within that time a new process waits."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "PATIENCE_SECONDS", 0.1)
        with pytest.raises(UserError, match=f"process {holder.pid} on ") as refused, claim(tmp_path / "run"):
            pass
    assert "\n" not in str(refused.value)
    subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {holder.pid}"])
    with claim(tmp_path / "run"):
        assert holder.wait(timeout=10) == -signal.SIGKILL
        assert str(os.getpid()) in (tmp_path / "run" / ".lock").read_text()
    assert not list((tmp_path / "run").iterdir())


def test_what_a_killed_writer_left_is_removed(tmp_path):
    """The names are those of atomic_write; other hidden files are the user's."""
    below = tmp_path / "predictions"
    below.mkdir()
    (below / ".round000001.safetensors.ab12cd34").write_text("text")
    for name in (".summary.csv.my0h5qh7", ".notes.markdown", "rounds.csv"):
        (tmp_path / name).write_text("text")
    with claim(tmp_path):
        left = sorted(file.name for file in tmp_path.iterdir())
        assert left == [".lock", ".notes.markdown", "predictions", "rounds.csv"]
        assert not list(below.iterdir())


def test_a_run_claims_its_folder_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    experiment = tiny_experiment(tmp_path, rounds=1)
    folder = run_folder(experiment)
    with claim(folder):
        with pytest.raises(UserError, match="is being written by another process"):
            run_small(experiment)
        assert {file.name for file in folder.iterdir()} == {".lock"}
    run_small(experiment)
    assert (folder / "summary.csv").is_file()
