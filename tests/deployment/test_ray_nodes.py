"""Two nodes of a Ray cluster in two network namespaces, each with 3 GiB of memory: one is killed, one joins."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
from machines import AVAILABLE, ip
from support import numbers

BIN, MEMORY = Path(sys.executable).parent, Path("/sys/fs/cgroup/memory")
HEAD, MODEL = "10.78.0.1:6379", ("digits", "--method", "scaffold", "--target", "rot75", "--set", "train.rounds=12")
NODES = {number: f"fsray{os.getpid() % 10_000}n{number}" for number in (1, 2)}
pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(not AVAILABLE, reason="needs root and iproute2"),
    pytest.mark.skipif(not (MEMORY / "tasks").is_file(), reason="needs control groups of version 1"),
]


def start(number, *words):
    """A program in a node's namespace and memory group."""

    def enter():
        (MEMORY / NODES[number] / "tasks").write_text(str(os.getpid()))

    return subprocess.Popen(["ip", "netns", "exec", NODES[number], BIN / words[0], *words[1:]], preexec_fn=enter)


def join(number):
    where = ["--head", "--port=6379", "--include-dashboard=false"] if number == 1 else [f"--address={HEAD}"]
    words = [f"--node-ip-address=10.78.0.{number}", "--num-cpus=1", f"--object-store-memory={100 * 2**20}", "--block"]
    return start(number, "ray", "start", *where, *words)


def kill(number):
    while pids := (MEMORY / NODES[number] / "tasks").read_text().split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)


@pytest.fixture
def nodes():
    for number, name in NODES.items():
        (MEMORY / name).mkdir()
        (MEMORY / name / "memory.limit_in_bytes").write_text(str(3 * 2**30))
        ip("netns", "add", name)
        if number == 2:
            ip("link", "add", "eth0", "netns", NODES[1], "type", "veth", "peer", "name", "eth0", "netns", name)
    for number, name in NODES.items():
        ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", name, "link", "set", link, "up")
    try:
        programs = [join(1)]
        while start(1, "ray", "status", f"--address={HEAD}").wait():
            time.sleep(1)
        yield [*programs, join(2)]
    finally:
        for number, name in NODES.items():
            kill(number)
            ip("netns", "del", name)
            (MEMORY / name).rmdir()
        Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)  # Ray leaves it behind when it is killed


def test_a_node_that_is_killed_and_one_that_joins_change_nothing(nodes, tmp_path):
    subprocess.run([BIN / "fedsim", "run", *MODEL, "--set", f"run.output={tmp_path / 'inline'}"], check=True)
    cluster = ("--runtime", "ray", "--set", f"run.ray_address={HEAD}")
    for name in ("killed", "joined"):
        run = start(1, "fedsim", "run", *MODEL, *cluster, "--set", f"run.output={tmp_path / name}")
        records = tmp_path / name / "digits" / "scaffold" / "rot75" / "seed0" / "rounds.csv"
        while not (records.is_file() and len(records.read_text().splitlines()) > 4):
            assert run.poll() is None
            time.sleep(0.1)
        if name == "killed":
            kill(2)
        else:
            nodes.append(join(2))
        assert run.wait(300) == 0
        wanted = numbers(tmp_path / "inline" / records.relative_to(tmp_path / name))
        pd.testing.assert_frame_equal(numbers(records), wanted, rtol=0, atol=0)
