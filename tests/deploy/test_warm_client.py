"""One client process for all tasks: exit codes, outputs, the end of a caller, and Flower's own program without it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fedsim.deploy import warm_client

ROOT = Path(__file__).parents[2]

SERVER = """
import sys, time
from pathlib import Path
from fedsim.deploy import warm_client
count = 0

class Module:
    fedsim_foreign = False

def run_task(words):
    global count
    count += 1
    print(f"task {count}: {' '.join(words)}", flush=True)
    if words == ["sleep"]:
        time.sleep(60)
    return 3 if words == ["fail"] else 0

warm_client.prepare = lambda: None
warm_client.run_task, warm_client.clientapp_module = run_task, lambda: Module
warm_client.PARENT_SECONDS = 0.2
warm_client.serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
"""


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


class Process:
    """The process, with tasks that need no Flower."""

    def __init__(self, kit, parent=0):
        self.kit = kit
        (kit / "run").mkdir(exist_ok=True)
        self.process = subprocess.Popen([sys.executable, "-c", SERVER, str(kit), str(parent)])
        wait_for(lambda: (kit / warm_client.PROGRAM).exists() and (kit / warm_client.SOCKET).exists())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait(10)

    def call(self, *words):
        return subprocess.run([self.kit / warm_client.PROGRAM, *words], capture_output=True, text=True, timeout=30)


def test_tasks_share_one_process(tmp_path):
    """Its count goes on; each caller gets its own output and exit code."""
    with Process(tmp_path) as process:
        first, second = process.call("a", "b"), process.call("fail")
    assert (first.returncode, first.stdout) == (0, "task 1: a b\n")
    assert (second.returncode, second.stdout) == (3, "task 2: fail\n")


def test_only_its_owner_can_give_it_tasks(tmp_path):
    with Process(tmp_path):
        assert (tmp_path / warm_client.SOCKET).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / warm_client.PROGRAM).stat().st_mode & 0o777 == 0o700


def test_work_that_nobody_waits_for_ends_the_process(tmp_path):
    """A stopped SuperNode's task does not block its successor: supervise.sh starts a new process."""
    with Process(tmp_path) as process:
        caller = subprocess.Popen([tmp_path / warm_client.PROGRAM, "sleep"], stdout=subprocess.PIPE, text=True)
        assert caller.stdout.readline() == "task 1: sleep\n"
        caller.send_signal(signal.SIGTERM)
        assert caller.wait(10) == 128 + signal.SIGTERM
        assert process.process.wait(10) == warm_client.FAILED


def test_it_ends_with_its_supervisor(tmp_path):
    parent = subprocess.Popen(["sleep", "60"])
    with Process(tmp_path, parent.pid) as process:
        parent.kill()
        parent.wait()
        assert process.process.wait(10) == warm_client.FAILED


def test_without_the_process_flowers_own_program_runs(tmp_path):
    """The next one in PATH, with the same words."""
    with Process(tmp_path):
        pass
    (tmp_path / warm_client.SOCKET).unlink()
    (tmp_path / "bin").mkdir()
    own = tmp_path / "bin" / "flwr-clientapp"
    own.write_text('#!/bin/sh\necho "own $*"\nexit 7\n')
    own.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "run" / "bin"), str(own.parent), os.environ["PATH"]])
    done = subprocess.run(
        [tmp_path / warm_client.PROGRAM, "x"], env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (7, "own x\n")


def test_the_program_imports_no_package():
    """It starts for every message: the standard library only."""
    code = (
        "import sys, runpy; runpy.run_path(PATH, run_name='y');"
        "print({'torch','flwr','fedsim','numpy'} & set(sys.modules))"
    ).replace("PATH", repr(str(Path(warm_client.__file__))))
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(("files", "code"), [(["pyproject.toml"], False), (["pyproject.toml", "a/b.py"], True)])
def test_bundles_with_code_are_told_apart(tmp_path, files, code):
    """They get fresh imports."""
    import io
    import zipfile

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as bundle:
        for name in files:
            bundle.writestr(name, "")
    assert warm_client.has_code(content.getvalue()) == code
    assert warm_client.has_code(b"no zip")


NODE, CLIENT, STRANGER = 61001, 61002, 61003  # ids of users; they need no names


def as_user(user, *words):
    return ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", *map(str, words)]


def python_for_all():
    """A Python that other users can start; this one may lie in a private folder."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    for python in (sys.executable, "/usr/bin/python3"):
        words = as_user(NODE, "sh", "-c", f"exec {python} -c 'import fedsim.deploy.warm_client'")
        if subprocess.run(words, capture_output=True, env={"PYTHONPATH": str(ROOT)}).returncode == 0:
            return python
    pytest.skip("no Python that other users can start")


@pytest.fixture
def separate(monkeypatch):
    """A kit of one user, with the folder of a client process of another user; words that start the process."""
    monkeypatch.setattr(sys, "executable", python_for_all())
    with tempfile.TemporaryDirectory() as name:
        kit, folder = Path(name), Path(name) / "client"
        (folder / "run").mkdir(parents=True)
        (kit / "key").write_text("secret")
        warm_client.write_program(kit, folder)
        program = kit / warm_client.PROGRAM
        for path, user, mode in (
            *((kit, NODE, 0o711), (kit / "key", NODE, 0o600), (folder, CLIENT, 0o711), (folder / "run", CLIENT, 0o711)),
            *((kit / "run", NODE, 0o755), (program.parent, NODE, 0o755), (program, NODE, 0o755)),
        ):
            os.chown(path, user, user)
            path.chmod(mode)
        yield kit, folder, as_user(CLIENT, sys.executable, "-c", SERVER, folder, 0, NODE)


def test_a_client_process_of_another_user(separate):
    """It takes tasks of the SuperNode's user and of nobody else, and it cannot read the key."""
    kit, folder, words = separate
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_for((folder / warm_client.SOCKET).exists)
        done = [
            subprocess.run(as_user(user, kit / warm_client.PROGRAM, "a"), capture_output=True, text=True, timeout=60)
            for user in (NODE, STRANGER)
        ]
    finally:
        process.kill()
        process.wait(10)
    assert [each.returncode for each in done] == [0, warm_client.FAILED]
    assert done[0].stdout == "task 1: a\n"
    assert subprocess.run(as_user(CLIENT, "cat", kit / "key"), capture_output=True).returncode != 0
    assert not (folder / warm_client.PROGRAM).exists()


def test_nothing_runs_in_place_of_another_users_process(separate, monkeypatch, capsys):
    """Without the process the task fails: Flower's own program would run with the SuperNode's rights."""
    _, folder, _ = separate
    monkeypatch.setattr(warm_client, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(warm_client, "become_flowers_own", lambda *words: pytest.fail("it ran Flower's own program"))
    monkeypatch.chdir(folder)
    assert warm_client.call(folder, "", ["a"]) == warm_client.FAILED
    assert "no client process" in capsys.readouterr().err
