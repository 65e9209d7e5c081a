"""Forks Flower's programs from a process that has imported PyTorch and Flower, which saves nine tenths of the time.

    warm.py serve SOCKET        the parent of all programs, until SIGTERM
    warm.py call NAME WORDS...  in place of the console script `NAME WORDS...`; the socket is $WARM_SOCKET

Each program is a separate process with the caller's environment, folder and outputs. It gets its caller's SIGTERM and
SIGINT, and SIGKILL when its caller has ended.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

FORWARDED = (signal.SIGTERM, signal.SIGINT)


def call(name: str, words: list[str]) -> int:
    """Let the program run; returns its exit code."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["WARM_SOCKET"])
        for number in FORWARDED:
            signal.signal(number, lambda number, frame: line.send(bytes([number])))
        here = {"name": name, "words": words, "environment": dict(os.environ), "folder": os.path.realpath(".")}
        order = json.dumps(here).encode()
        socket.send_fds(line, [len(order).to_bytes(8, "big")], [1, 2])
        line.sendall(order)
        answer = line.recv(1)
    return answer[0] if answer else 137


def serve(path: str) -> None:
    """Fork a program for every request."""
    from importlib.metadata import entry_points

    programs = {point.name: point for point in entry_points(group="console_scripts")}
    own = ("fedsim.apps.client", "fedsim.commands.cli")
    for module in ("flwr.supernode.cli", "flwr.superlink.cli", "flwr.cli.app", *own):
        importlib.import_module(module)
    importlib.import_module("fedsim.deploy.runtime")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen(64)
        while True:
            line, _ = door.accept()
            if os.fork() == 0:
                door.close()
                os._exit(adopt(line, programs))
            line.close()


def adopt(line: socket.socket, programs: dict) -> int:
    """Watch one program: report its exit code, forward signals, and end it when its caller has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    head, outputs, *_ = socket.recv_fds(line, 8, 2)
    order = bytearray()
    while len(order) < int.from_bytes(head, "big"):
        order += line.recv(1 << 16)
    child = os.fork()
    if child == 0:
        become(json.loads(order), outputs, programs)
    if (watcher := os.fork()) == 0:
        watch(line, child)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os.kill(watcher, signal.SIGKILL)
    os.waitpid(watcher, 0)
    with contextlib.suppress(OSError):
        line.sendall(bytes([code if code >= 0 else 128 - code]))
    return 0


def watch(line: socket.socket, child: int) -> None:
    """Forward the caller's signals to the child; end the child when the caller has ended."""
    with contextlib.suppress(ProcessLookupError):
        while number := line.recv(1):
            os.kill(child, number[0])
        os.kill(child, signal.SIGKILL)
    os._exit(0)


def become(order: dict, outputs: list[int], programs: dict) -> None:
    """Let this process become the program."""
    import runpy

    for number, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    for number in (*FORWARDED, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv = [order["name"], *order["words"]]
    sys.executable = str(Path(os.environ["WARM_SOCKET"]).with_name("python"))  # programs are looked for next to it
    faulty = order["name"] == "flwr-clientapp" or order["words"][:2] in (["deploy", "client"], ["deploy", "supernode"])
    if "FEDSIM_FAULT" in os.environ and faulty:
        runpy.run_path(os.environ["FEDSIM_FAULTY"], run_name="faulty")
    try:
        sys.exit(programs[order["name"]].load()())
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(call(sys.argv[2], sys.argv[3:]))
