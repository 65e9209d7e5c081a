"""One client process for all messages of a site: PyTorch, data and model stay in memory between rounds.

Flower starts `flwr-clientapp` anew for every message. A program of that name, first in the SuperNode's PATH, hands each
task to this process instead:

    fedsim deploy client KIT          the process itself, kept alive by supervise.sh; writes KIT/run/bin/flwr-clientapp
    KIT/run/bin/flwr-clientapp ...    what Flower starts: waits for the process and returns its exit code; without the
                                      process it becomes Flower's own program

Tasks come one at a time, as a SuperNode takes them. When the waiting program is gone (its SuperNode was stopped) or the
work cannot be interrupted, the process ends, and supervise.sh starts a new one. App bundles with Python files of their
own get fresh imports, and the process ends after them.

The process may belong to a user of its own (CLIENT_USER in site.env), who cannot read the site's key. It then lives in
KIT/client and takes tasks of the SuperNode's user alone. Nothing ever runs as the SuperNode's user in its place.

This file is also run alone, without any package: it imports the standard library only at its top.
"""

import contextlib
import io
import json
import os
import shlex
import signal
import socket
import struct
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOCKET, PROGRAM = "run/client.sock", "run/bin/flwr-clientapp"
TASK = "flwr.supernode.runtime.run_clientapp:"
OWN_PACKAGES = ("fedsim", "strategies", "clients")
FAILED = 1
PARENT_SECONDS = 5.0
WAIT_SECONDS = 60.0  # for a process of another user, which is being started


class EndedError(BaseException):
    """A task ended with an exit code, where Flower would end its process."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


# ------------------------------------------------------------------------------------------------- the waiting program


def call(folder: Path, own: str, words: list[str]) -> int:
    """Send a task to the process in this folder, wait for it, and return its exit code.

    own: the folder of this program; empty when the process has a user of its own, and nobody may do its work instead.
    """
    with socket.socket(socket.AF_UNIX) as line:
        os.chdir(folder)  # the path of a socket is short
        deadline = time.monotonic() + (0 if own else WAIT_SECONDS)
        while True:
            try:
                line.connect(SOCKET)
                break
            except OSError as error:
                if own:
                    become_flowers_own(own, words)
                if time.monotonic() > deadline:
                    print(f"no client process in {folder}: {error}", file=sys.stderr, flush=True)
                    return FAILED
                time.sleep(0.5)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: os._exit(128 + number))
        order = json.dumps(words).encode()
        socket.send_fds(line, [struct.pack("!I", len(order))], [1, 2])
        line.sendall(order)
        answer = line.recv(1)
    return answer[0] if answer else FAILED


def become_flowers_own(own: str, words: list[str]) -> None:
    """Run Flower's own program of this name, which is later in PATH than this one's folder."""
    path = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder != own]
    os.environ["PATH"] = os.pathsep.join(path)
    os.execvp("flwr-clientapp", ["flwr-clientapp", *words])


# ---------------------------------------------------------------------------------------------------------- the process


def serve(folder: Path, parent: int = 0, caller: int | None = None) -> None:
    """Do tasks until SIGTERM, or until the process `parent` is gone.

    folder: the kit. caller: id of the user whose tasks are done next to this process's own user's; the folder is then
    this user's own, and the caller's SuperNode writes the program that Flower starts.
    """
    if parent:
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    prepare()
    os.chdir(folder)
    door_file = Path(SOCKET)
    door_file.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as door:
        mask = os.umask(0o177 if caller is None else 0o111)
        door.bind(SOCKET)
        os.umask(mask)
        door.listen(8)
        if caller is None:
            write_program(folder, folder)
        print("client process ready", flush=True)
        try:
            while True:
                line, _ = door.accept()
                with line:
                    if peer(line) in (os.getuid(), caller):
                        do_one(line)
        finally:
            door_file.unlink(missing_ok=True)


def end_with(parent: int) -> None:
    """End this process when another one has ended."""
    while True:
        time.sleep(PARENT_SECONDS)
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(FAILED)
        except PermissionError:  # another user's process, which lives
            continue


def peer(line: socket.socket) -> int:
    """Id of the user at the other end, as the kernel knows it."""
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user


def write_program(kit: Path, folder: Path) -> None:
    """Write the program that Flower starts; `folder` is the client process's own, or the kit when it has none."""
    from fedsim.common.files import atomic_write

    program_folder = (kit / PROGRAM).parent if folder == kit else ""
    command = [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(folder), str(program_folder)]
    text = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    atomic_write(kit / PROGRAM, text, mode=0o700, durable=True)


def prepare() -> None:
    """Imports what every task needs, and makes Flower's task end by EndedError instead of ending the process."""
    import fedsim.apps.client  # noqa: F401
    from fedsim.deploy.check_app import client  # noqa: F401
    from fedsim.flower.private import replace

    look_often()
    module = clientapp_module()
    module.fedsim_foreign = False
    replace(f"{TASK}flwr_exit", lambda _: end_task)
    replace(f"{TASK}start_parent_process_monitor", lambda _: lambda parent: None)  # `watch` does it

    def noting(install: Callable[..., Any]) -> Callable[..., Any]:
        def installing(content: bytes, **options: Any) -> Any:
            if has_code(content):
                forget_own_packages()
                module.fedsim_foreign = True
            return install(content, **options)

        return installing

    replace(f"{TASK}install_from_fab", noting)


def look_often() -> None:
    """Makes Flower look for missing parts of a message after a tenth of a second, and not after a whole one.

    Flower 1.41 starts a task, and gives out a message, before their parts have arrived.
    """
    from fedsim.flower.private import private

    names = private("flwr.supercore.inflatable.inflatable_utils:pull_objects.__kwdefaults__")
    names.update(initial_backoff=0.1, backoff_cap=2.0)


def clientapp_module() -> Any:
    """Flower's module that runs one task."""
    import importlib

    return importlib.import_module(TASK[:-1])


def do_one(line: socket.socket) -> None:
    """Receives one task, runs it with the caller's outputs, and sends its exit code."""
    head, outputs, *_ = socket.recv_fds(line, 4, 2)
    if len(head) < 4 or len(outputs) < 2:
        return
    order = bytearray()
    while len(order) < struct.unpack("!I", head)[0]:
        chunk = line.recv(1 << 16)
        if not chunk:
            return
        order += chunk
    done = threading.Event()
    threading.Thread(target=watch, args=(line, done), daemon=True).start()
    with outputs_of(outputs):
        code = run_task(json.loads(order))
    done.set()
    with contextlib.suppress(OSError):
        line.sendall(bytes([code & 0xFF]))
    if clientapp_module().fedsim_foreign:
        os._exit(0)  # its modules are not this site's


def watch(line: socket.socket, done: threading.Event) -> None:
    """Ends the process when the caller has gone before its task was done."""
    with contextlib.suppress(OSError):
        line.recv(1)
    if not done.is_set():
        os._exit(FAILED)


@contextlib.contextmanager
def outputs_of(descriptors: list[int]) -> Any:
    """Within this block, output goes to the caller's outputs."""
    outputs = [os.dup(number) for number in (1, 2)]
    try:
        for number, descriptor in enumerate(descriptors, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def run_task(words: list[str]) -> int:
    """Flower's `flwr-clientapp` with these words, in this process."""
    from fedsim.flower.private import private

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)}
    path, folder, program = list(sys.path), Path.cwd(), sys.argv
    sys.argv = ["flwr-clientapp", *words]
    try:
        private("flwr.supernode.cli.flwr_clientapp:flwr_clientapp")()
        return 0
    except EndedError as ended:
        return 0 if 0 <= ended.code < 100 else FAILED
    except SystemExit as ended:
        return int(ended.code or 0)
    except Exception as error:
        print(f"the task failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return FAILED
    finally:
        sys.argv, sys.path[:] = program, path
        os.chdir(folder)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_task(code: int, *words: Any, **options: Any) -> None:
    """Do what Flower does before it ends a process, but do not end the process."""
    from fedsim.flower.private import private

    for early in (True, False):
        private("flwr.supercore.exit.exit_handler:trigger_exit_handlers")(run_before_force_exit=early)
    raise EndedError(code)


def has_code(content: bytes) -> bool:
    """Whether an app bundle has Python files."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            return any(name.endswith(".py") for name in bundle.namelist())
    except zipfile.BadZipFile:
        return True


def forget_own_packages() -> None:
    """The bundle's own modules are imported in place of the installed ones."""
    for name in [name for name in sys.modules if name.split(".")[0] in OWN_PACKAGES and name != __name__]:
        del sys.modules[name]


if __name__ == "__main__":
    sys.exit(call(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
