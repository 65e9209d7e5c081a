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

from fedsim.flower.processes import SuperLink
from fedsim.run.plan import complete
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import read_experiment

FEDSIM = [sys.executable, "-c", "from fedsim.commands.cli import main; main()"]
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RECORDS = Path("small", "fedavg", "rot45", "seed0")


def settings_of(experiment, *more: str) -> list[str]:
    """The options of the command line for `small_experiment`."""
    words = [
        "data.domains=" + str(experiment.data.domains).replace("'", '"'),
        "data.fraction=0.1",
        "data.holdout=0.2",
        f"train.rounds={experiment.train.rounds}",
        f"train.batch_size={experiment.train.batch_size}",
        "train.momentum=0.5",
        "run.device=cpu",
        "name=small",
        *more,
    ]
    return [part for word in words for part in ("--set", word)]


def command(experiment, output: Path, runtime: str, *more: str) -> list[str]:
    """`fedsim run` of a small experiment."""
    words = ["--method", experiment.method_name, "--target", "rot45", "--output", str(output), "--runtime", runtime]
    return [*FEDSIM, "run", "digits", *words, *settings_of(experiment, *more)]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


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


@pytest.mark.slow
def test_a_run_spans_the_machines_of_an_existing_cluster(two_nodes, tmp_path):
    """Two nodes with one CPU each have one worker each; the numbers are those of the inline runtime."""
    experiment = small_experiment(tmp_path / "inline", "fedbn")
    inline, _ = run_small(experiment)
    words = (f'run.ray_address="{two_nodes}"', "run.workers=2")
    done = run(command(experiment, tmp_path / "ray", "ray", *words), tmp_path)
    assert done.returncode == 0, done.stderr
    same(tmp_path / "ray" / "small" / "fedbn" / "rot45" / "seed0", inline)


@pytest.mark.slow
def test_no_cluster_at_the_address_is_one_line(tmp_path):
    address = f'run.ray_address="127.0.0.1:{free_ports(1)[0]}"'
    done = run(command(small_experiment(tmp_path), tmp_path, "ray", address), tmp_path)
    assert done.returncode == 2
    assert "no Ray cluster at" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_ctrl_c_leaves_nothing_behind(verb, tmp_path):
    """A run interrupted in a round has exit code 130, prints only the interruption, and leaves no Ray process."""
    experiment = small_experiment(tmp_path, train={"rounds": 300})
    sweep = [*FEDSIM, "sweep", "digits", "--methods", "fedavg", "--targets", "rot45", "--seeds", "0", "--jobs", "1"]
    sweep += ["--output", str(tmp_path), *settings_of(experiment, "run.runtime=ray")]
    folder = Path("/tmp") / f"fc{os.getpid()}"  # its name is in the command lines of Ray's processes
    process = subprocess.Popen(
        command(experiment, tmp_path, "ray") if verb == "run" else sweep,
        cwd=tmp_path, env={**os.environ, "RAY_TMPDIR": str(folder)}, start_new_session=True, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    rounds = tmp_path / RECORDS / "rounds.csv"

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
def test_flowers_engine_gives_the_numbers_of_inline(tmp_path):
    experiment = small_experiment(tmp_path / "inline", "fedbn")
    inline, _ = run_small(experiment)
    done = run(command(experiment, tmp_path / "flower", "flower"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    same(tmp_path / "flower" / "small" / "fedbn" / "rot45" / "seed0", inline, 1e-4)
    assert not processes_with("fedsim-flower-")  # no SuperLink is left


@pytest.mark.flower
def test_a_failing_run_in_flowers_engine_exits_1(tmp_path):
    """`flwr run` itself would exit with 0."""
    done = run(command(small_experiment(tmp_path), tmp_path, "flower", "run.timeout=0.001"), tmp_path)  # too short
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Flower's run ended as finished:failed" in done.stderr
    assert not processes_with("fedsim-flower-")


@pytest.mark.flower
def test_flwr_run_from_the_repository(tmp_path):
    """`flwr run . --stream`, as in the README, uses pyproject's settings, which the run config overrides."""
    words = ["train.rounds=2", "data.fraction=0.1", "run.device=cpu"]
    inline, _ = run_small(complete(read_experiment("digits", [*words, f"run.output={tmp_path / 'inline'}"])))
    config = f"experiment='digits' method='fedavg' seed=0 output='{tmp_path / 'flwr'}' overrides='{' '.join(words)}'"
    flwr = [BIN / "flwr", "run", ".", "--stream", "--run-config", config]
    nodes = ["--federation-config", "num-supernodes=5 client-resources-num-cpus=1"]
    with SuperLink(tmp_path, {}) as link:
        subprocess.run([*flwr, *nodes], cwd=ROOT, env=link.environment, check=True, capture_output=True)
    same(tmp_path / "flwr" / "digits" / "fedavg" / "rot75" / "seed0", inline, 1e-4)


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
def test_the_start_pages_flwr_run_gives_somebody_who_never_used_flower_the_inline_numbers(newcomer, tmp_path):
    app, variables = newcomer
    (line,) = re.findall(r"^flwr run .*$", (ROOT / "docs" / "start.md").read_text(), flags=re.M)
    done = subprocess.run(shlex.split(line), cwd=app, env=variables, capture_output=True, text=True, timeout=900)
    records = app / "outputs" / "digits" / "fedavg" / "rot75" / "seed0"
    assert (records / "summary.csv").is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 simulated SuperNodes" in done.stdout + done.stderr  # Flower's default, for five clients
    words = ["method.name=fedavg", "run.target=rot75", "run.seed=0", f"run.output={tmp_path / 'inline'}"]
    same(records, launch(read_experiment("digits", words)))
