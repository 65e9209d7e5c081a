"""The SuperNode of a kit, and its one client process for all tasks: exit codes, outputs, the end of a caller."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from flwr.supercore.run import RunNotRunningException
from processes import until

from fedsim.common.errors import UserError
from fedsim.deploy import warm_client
from fedsim.deploy.supernode import check_node_config, confirming, failing_with_the_run
from fedsim.deploy.warm_client import FAILED, PROGRAM, SOCKET

ROOT = Path(__file__).parents[2]
NODE, CLIENT, STRANGER = 61001, 61002, 61003  # ids of users; they need no names
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
warm_client.PARENT_SECONDS = 0.1
warm_client.serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
"""


def run(*words, **named):
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **named)


@pytest.fixture
def serve():
    """serve(words): the client process, with tasks that need no Flower; it ends with the test."""
    started = []

    def start(*words, folder, **named):
        started.append(subprocess.Popen([*map(str, words)], **named))
        until((folder / SOCKET).exists, 30)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def test_tasks_share_one_process_until_nobody_waits_for_its_work(serve, tmp_path):
    """Each caller gets its own output and exit code. A stopped SuperNode's task does not block its successor: the
    process ends, and supervise.sh starts a new one. Without it the next program of Flower in PATH runs."""
    (tmp_path / "run").mkdir()
    process = serve(sys.executable, "-c", SERVER, tmp_path, 0, folder=tmp_path)
    program = tmp_path / PROGRAM
    until(program.exists)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in (SOCKET, PROGRAM)] == [0o600, 0o700]
    for words, answer in ((("a", "b"), (0, "task 1: a b\n")), (("fail",), (3, "task 2: fail\n"))):
        done = run(program, *words)
        assert (done.returncode, done.stdout) == answer
    caller = subprocess.Popen([program, "sleep"], stdout=subprocess.PIPE, text=True)
    assert caller.stdout.readline() == "task 3: sleep\n"
    caller.send_signal(signal.SIGTERM)
    assert caller.wait(10) == 128 + signal.SIGTERM
    assert process.wait(10) == FAILED
    (tmp_path / SOCKET).unlink(missing_ok=True)
    own = tmp_path / "flwr-clientapp"
    own.write_text('#!/bin/sh\necho "own $*"\nexit 7\n')
    own.chmod(0o755)
    path = os.pathsep.join([str(program.parent), str(tmp_path), os.environ["PATH"]])
    done = run(program, "x", env={**os.environ, "PATH": path})
    assert (done.returncode, done.stdout) == (7, "own x\n")


def test_it_ends_with_its_supervisor(serve, tmp_path):
    (tmp_path / "run").mkdir()
    parent = subprocess.Popen(["sleep", "60"])
    process = serve(sys.executable, "-c", SERVER, tmp_path, parent.pid, folder=tmp_path)
    parent.kill()
    parent.wait()
    assert process.wait(10) == FAILED


def test_the_program_imports_no_package_and_runs_in_any_folder(tmp_path, monkeypatch):
    """It starts for every message."""
    code = f"import sys, runpy; runpy.run_path({str(Path(warm_client.__file__))!r}, run_name='y');"
    code += "print({'torch','flwr','fedsim','numpy'} & set(sys.modules))"
    done = run(sys.executable, "-S", "-E", "-c", code)
    assert done.stdout.strip() == "set()", done.stderr
    folder = tmp_path / "it's a `id` \"d $HOME back\\slash"
    (folder / "run" / "bin").mkdir(parents=True)
    monkeypatch.setattr(warm_client.sys, "executable", "/bin/echo")
    warm_client.write_program(folder, folder)
    assert run(folder / PROGRAM, "task").stdout.endswith(f"{folder} {folder}/run/bin task\n")


def test_bundles_with_code_get_fresh_imports():
    for files, code in ((["pyproject.toml"], False), (["pyproject.toml", "a/b.py"], True)):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as bundle:
            for name in files:
                bundle.writestr(name, "")
        assert warm_client.has_code(content.getvalue()) == code
    assert warm_client.has_code(b"no zip")


def as_user(user, *words):
    return ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", *map(str, words)]


@pytest.fixture
def separate(monkeypatch):
    """(kit of one user, folder of a client process of another user), and a Python that both can start."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    for python in (sys.executable, "/usr/bin/python3"):  # the first may lie in a private folder
        words = as_user(NODE, "sh", "-c", f"exec {python} -c 'import fedsim.deploy.warm_client'")
        if run(*words, env={"PYTHONPATH": str(ROOT)}).returncode == 0:
            break
    else:
        pytest.skip("no Python that other users can start")
    monkeypatch.setattr(sys, "executable", python)
    with tempfile.TemporaryDirectory() as name:
        kit, folder = Path(name), Path(name) / "client"
        (folder / "run").mkdir(parents=True)
        (kit / "key").write_text("secret")
        warm_client.write_program(kit, folder)
        program = kit / PROGRAM
        places = {kit: 0o711, kit / "key": 0o600, kit / "run": 0o755, program.parent: 0o755, program: 0o755}
        for path, mode in {**places, folder: 0o711, folder / "run": 0o711}.items():
            user = NODE if path in places else CLIENT
            os.chown(path, user, user)
            path.chmod(mode)
        yield kit, folder


def test_a_client_process_of_another_user_takes_tasks_of_the_supernodes_user_alone_and_cannot_read_the_key(
    separate, serve
):
    kit, folder = separate
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    serve(*as_user(CLIENT, sys.executable, "-c", SERVER, folder, 0, NODE), folder=folder, env=environment)
    done = [run(*as_user(user, kit / PROGRAM, "a")) for user in (NODE, STRANGER)]
    assert [each.returncode for each in done] == [0, FAILED]
    assert done[0].stdout == "task 1: a\n"
    assert run(*as_user(CLIENT, "cat", kit / "key")).returncode != 0
    assert not (folder / PROGRAM).exists()


def test_nothing_runs_in_place_of_another_users_process(tmp_path, monkeypatch, capsys):
    """Without the process the task fails: Flower's own program would run with the SuperNode's rights."""
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(warm_client, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(warm_client, "become_flowers_own", lambda *words: pytest.fail("it ran Flower's own program"))
    assert warm_client.call(tmp_path, "", ["a"]) == FAILED
    assert "no client process" in capsys.readouterr().err


def ends(*words):
    """The SuperLink's answer about a run that has ended."""
    raise RunNotRunningException


def receive(internal, pull, confirm):
    """Flower's receiving of one message: the node's state and its store of parts."""
    state, store = Mock(), Mock()
    state.create_task.return_value = 7
    store.preregister.return_value = ["part"]
    metadata = SimpleNamespace(run_id=1, message_id="m", message_type="train", group_id="")
    received = internal._pull_and_store_message(
        state=state, object_store=store, node_config={}, receive=lambda: (SimpleNamespace(metadata=metadata), Mock()),
        get_run=Mock(), get_fab=Mock(), pull_object=pull, confirm_message_received=confirm, trusted_entities=None,
    )  # fmt: skip
    assert received is None
    return state, store


@pytest.mark.parametrize("where", ["parts", "confirmation"])
def test_the_task_of_a_run_that_ends_meanwhile_ends_too(monkeypatch, where):
    """The client, which may wait for the message's parts already, must not wait on: it does one task at a time, and the
    next run's would come after Flower's 500 tries. If the client answered a message that was not confirmed, that answer
    would be sent instead of the next one, which would be sent instead of the one after it, and so on."""
    internal = import_module("flwr.supernode.start_client_internal")
    pull, confirm = (ends, Mock()) if where == "parts" else (lambda run, part: b"content", ends)
    state, _ = receive(internal, pull, confirm)
    assert not state.finish_task.called, "Flower ends the task itself now: this patch can go"
    monkeypatch.setattr(internal, "pull_objects", failing_with_the_run(internal.pull_objects))
    state, store = receive(internal, pull, confirming(lambda *words: confirm)(Mock(), Mock(), 1))
    assert state.finish_task.call_args.args == (7,)
    assert "the run has ended" in state.finish_task.call_args.kwargs["details"]
    state.delete_messages.assert_called_once_with(message_ids=["m"])
    store.delete.assert_called_once_with("m")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("dp_clip=0.5 dp_epsilon=1.0", "'dp_clip' is unknown"),
        ("dp-clip = 0.5 dp-epsilon = 1.0", "is not key=value"),
        ("dp-clip=0,5 dp-epsilon=1.0", "cannot read this site's settings"),
        ("dp-clip=.5 dp-epsilon=1.0", "cannot read this site's settings"),
        ("dp-clip=0.5 dp-clip=0.5", "cannot read this site's settings"),
        ("dp-epsilon=1.0", "without dp-clip"),
        ("data-dir='/home/o'brien/data' dp-clip=0.5 dp-epsilon=1.0", "is not key=value"),
        ("statistics-lest=20", "'statistics-lest' is unknown; did you mean 'statistics-least'"),
        ("Statistics_Least=20", "'Statistics_Least' is unknown; did you mean 'statistics-least'"),
        ("statistics-least='20'", "statistics-least must be a finite number, not '20'"),
        ("statistics-least=true", "statistics-least must be a finite number, not True"),
        ("dp-clip=0.5 dp-epsilon=1.0 data-dir='/data/of beta' mine=3 statistics-least=20.5", ""),
    ],
)
def test_a_node_config_that_flower_would_read_otherwise_is_refused_at_the_start(more, said):
    """Flower leaves out what does not look like a pair, and with it the site's privacy."""
    words = ["--superlink", "a:1", "--node-config", f"site='alpha' domain='rot0' role='source' {more}"]
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        check_node_config(words)
