"""Slow tests with real processes: a Ray cluster of two nodes, Ctrl-C, Flower's own engine, `flwr run`."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from processes import command_lines, until
from support import free_ports, numbers, run_small, small_experiment

from fedsim.runs.plan import run_folder
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import read_experiment

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def command(experiment) -> list[str]:
    """`fedsim run` of an experiment, which is written into a file."""
    file = Path(experiment.run.output).with_suffix(".toml")
    file.write_text(experiment.toml())
    return [sys.executable, "-c", "from fedsim.commands.cli import main; main()", "run", str(file)]


def processes_with(word: str) -> list[int]:
    return [pid for pid, line in command_lines().items() if word in line]


def same(records: Path, inline: Path, rtol: float = 0) -> None:
    pd.testing.assert_frame_equal(numbers(records / "rounds.csv"), numbers(inline / "rounds.csv"), rtol=rtol, atol=0)


@pytest.fixture
def two_nodes():
    """The address of two Ray nodes with one CPU each on loopback, which have their own ports and temporary folder."""
    pytest.importorskip("ray")
    gcs, *ports = free_ports(5)
    folder = Path("/tmp") / f"fs{os.getpid()}"  # short: Ray's sockets live below it
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    common = ["--num-cpus", "1", "--disable-usage-stats", "--block", "--node-ip-address", "127.0.0.1"]
    head = ["--head", "--port", str(gcs), "--temp-dir", str(folder), "--include-dashboard", "false"]
    nodes = []
    try:
        for place, *own in ((head, *ports[:2]), (["--address", f"127.0.0.1:{gcs}"], *ports[2:])):
            own = ["--node-manager-port", str(own[0]), "--object-manager-port", str(own[1])]
            words = [BIN / "ray", "start", *place, *common, *own]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
            nodes.append(subprocess.Popen(words, env=environment, **quiet))
            until(partial(listens, ports[2] if nodes[1:] else gcs), 60, "Ray node")
        yield f"127.0.0.1:{gcs}"
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
    assert not processes_with(str(gcs))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("runtime", [
    pytest.param("ray", marks=pytest.mark.slow), pytest.param("flower", marks=pytest.mark.flower),
])  # fmt: skip
def test_a_cluster_of_two_machines_and_flowers_engine_give_the_numbers_of_inline(runtime, tmp_path, request):
    """The two nodes with one CPU each have one worker each."""
    own = {"ray_address": request.getfixturevalue("two_nodes"), "workers": 2} if runtime == "ray" else {}
    inline, _ = run_small(small_experiment(tmp_path / "inline", "fedbn"))
    experiment = small_experiment(tmp_path / runtime, "fedbn", run={"runtime": runtime, **own})
    done = subprocess.run(command(experiment), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    same(run_folder(experiment), inline, 0 if runtime == "ray" else 1e-4)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path):
    """A run interrupted in a round has exit code 130, prints only the interruption, and leaves no Ray process."""
    experiment = small_experiment(tmp_path / "out", train={"rounds": 300}, run={"runtime": "ray"})
    folder = Path("/tmp") / f"fc{os.getpid()}"  # its name is in the command lines of Ray's processes
    process = subprocess.Popen(
        command(experiment), env={**os.environ, "RAY_TMPDIR": str(folder)}, start_new_session=True, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    rounds = run_folder(experiment) / "rounds.csv"

    def trains():
        return rounds.is_file() and len(rounds.read_text().splitlines()) > 3

    until(lambda: trains() or process.poll() is not None, 300)
    assert processes_with(str(folder))
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "SIGTERM" not in said
    assert trains()
    until(lambda: not processes_with(str(folder)), 10, "end of Ray")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.flower
def test_a_failing_run_in_flowers_engine_exits_1(tmp_path):
    """`flwr run` itself would exit with 0."""
    too_short = small_experiment(tmp_path / "out", run={"runtime": "flower", "timeout": 0.001})
    done = subprocess.run(command(too_short), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Flower's run ended as finished:failed" in done.stderr
    assert not processes_with("fedsim-flower-")


@pytest.fixture
def newcomer(tmp_path):
    """A copy of the repository, and the environment of a user with an empty home; processes that are left are ended.

    Flower installs nothing here, because it would take 5 GB, as the page says.
    """
    app = tmp_path / "app"
    for name in ("fedsim", "clients", "strategies", "configs"):
        shutil.copytree(ROOT / name, app / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, app / name)
    (tmp_path / "home").mkdir()
    (port,) = free_ports(1)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "PYTHONPATH"))}
    yield (
        app,
        {
            **kept,
            "HOME": str(tmp_path / "home"),
            "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),  # somebody else's SuperLink may run on this machine
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
        },
    )

    def left():
        return [pid for pid, line in command_lines().items() if str(port) in line and "flower-super" in line]

    for process in left():
        os.kill(process, signal.SIGTERM)
    until(lambda: not left(), 15, "end of the SuperLink")


@pytest.mark.flower
def test_the_flwr_run_of_the_page_of_runtimes_gives_a_newcomer_the_inline_numbers(newcomer, tmp_path):
    app, variables = newcomer
    (line,) = re.findall(r"^flwr run .*$", (ROOT / "docs" / "runtimes.md").read_text(), flags=re.M)
    done = subprocess.run(shlex.split(line), cwd=app, env=variables, capture_output=True, text=True, timeout=900)
    records = app / "outputs" / "digits" / "fedavg" / "rot75" / "seed0"
    assert (records / "summary.csv").is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 simulated SuperNodes" in done.stdout + done.stderr  # Flower's default, for five clients
    words = ["method.name=fedavg", "run.target=rot75", "run.seed=0", f"run.output={tmp_path / 'inline'}"]
    same(records, launch(read_experiment("digits", words)))
