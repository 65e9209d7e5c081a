"""Slow tests with real processes: a Ray cluster of two nodes, Ctrl-C, Flower's own engine with its exit code."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from support import free_ports, numbers, run_small, small_experiment

from fedsim.run.plan import complete
from fedsim.settings.experiment import read_experiment

FEDSIM = [sys.executable, "-c", "from fedsim.commands.cli import main; main()"]
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def settings_of(experiment) -> list[str]:
    """The arguments of the command line for `small_experiment`."""
    words = [
        "data.domains=" + str(experiment.data.domains).replace("'", '"'),
        "data.fraction=0.1",
        "data.holdout=0.2",
        f"train.rounds={experiment.train.rounds}",
        f"train.batch_size={experiment.train.batch_size}",
        "train.momentum=0.5",
        "run.device=cpu",
        "name=small",
    ]
    return [part for word in words for part in ("--set", word)]


def command(experiment, output: Path, runtime: str, *more: str) -> list[str]:
    """`fedsim run` of a small experiment."""
    return [
        *FEDSIM,
        "run",
        "digits",
        "--method",
        experiment.method_name,
        "--target",
        "rot45",
        "--output",
        str(output),
        "--runtime",
        runtime,
        *settings_of(experiment),
        *more,
    ]


def processes_with(word: str) -> list[str]:
    """Command lines of living processes that contain a word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and int(folder.name) != os.getpid():
            found.append(line)
    return found


@pytest.fixture
def two_nodes(tmp_path_factory):
    """The address of two Ray nodes with one CPU each on loopback, which have their own ports and temporary folder."""
    pytest.importorskip("ray")
    gcs, *ports = free_ports(5)
    folder = Path("/tmp") / f"fs{os.getpid()}"  # short: Ray's sockets live below it
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    common = ["--num-cpus", "1", "--disable-usage-stats", "--block", "--node-ip-address", "127.0.0.1"]
    nodes = []
    try:
        for number, place in enumerate(
            (
                ["--head", "--port", str(gcs), "--temp-dir", str(folder), "--include-dashboard", "false"],
                ["--address", f"127.0.0.1:{gcs}"],
            )
        ):
            own = ["--node-manager-port", str(ports[2 * number]), "--object-manager-port", str(ports[2 * number + 1])]
            nodes.append(
                subprocess.Popen(
                    [BIN / "ray", "start", *place, *common, *own],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            wait_for_port(gcs if number == 0 else ports[2])
        yield f"127.0.0.1:{gcs}"
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
    assert not processes_with(str(gcs))


def wait_for_port(port: int) -> None:
    """Wait until a process listens on the port."""
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port}")


@pytest.mark.slow
def test_a_run_spans_the_machines_of_an_existing_cluster(two_nodes, tmp_path):
    """Two nodes with one CPU each have one worker each; the numbers are those of the inline runtime."""
    experiment = small_experiment(tmp_path / "inline", "fedbn")
    inline, _ = run_small(experiment)
    words = ["--set", f'run.ray_address="{two_nodes}"', "--set", "run.workers=2"]
    done = subprocess.run(
        command(experiment, tmp_path / "ray", "ray", *words), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ray = tmp_path / "ray" / "small" / "fedbn" / "rot45" / "seed0"
    pd.testing.assert_frame_equal(numbers(ray / "rounds.csv"), numbers(inline / "rounds.csv"), rtol=0, atol=0)


@pytest.mark.slow
def test_no_cluster_at_the_address_is_one_line(tmp_path):
    """Exit code 2, no traceback."""
    (port,) = free_ports(1)
    words = ["--set", f'run.ray_address="127.0.0.1:{port}"']
    done = subprocess.run(
        command(small_experiment(tmp_path), tmp_path, "ray", *words), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no Ray cluster at" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_ctrl_c_leaves_nothing_behind(verb, tmp_path):
    """A run interrupted in a round has exit code 130, prints only the interruption, and leaves no Ray process."""
    experiment = small_experiment(tmp_path, train={"rounds": 300})
    sweep = [*FEDSIM, "sweep", "digits", "--methods", "fedavg", "--targets", "rot45", "--seeds", "0", "--jobs", "1"]
    sweep += ["--output", str(tmp_path), "--set", "run.runtime=ray", *settings_of(experiment)]
    folder = Path("/tmp") / f"fc{os.getpid()}"  # its name is in the command lines of Ray's processes
    process = subprocess.Popen(
        command(experiment, tmp_path, "ray") if verb == "run" else sweep,
        cwd=tmp_path,
        env={**os.environ, "RAY_TMPDIR": str(folder)},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    rounds = tmp_path / "small" / "fedavg" / "rot45" / "seed0" / "rounds.csv"
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if rounds.is_file() and len(rounds.read_text().splitlines()) > 3:
            break
        time.sleep(0.1)
    assert processes_with(str(folder))
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "SIGTERM" not in said
    assert len(rounds.read_text().splitlines()) > 3
    for _ in range(100):
        if not processes_with(str(folder)):
            break
        time.sleep(0.1)
    assert not processes_with(str(folder))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.flower
def test_flowers_engine_gives_the_numbers_of_inline(tmp_path):
    """`fedsim run --runtime flower` has exit code 0, records the same rounds, and leaves no SuperLink."""
    experiment = small_experiment(tmp_path / "inline", "fedbn")
    inline, _ = run_small(experiment)
    done = subprocess.run(
        command(experiment, tmp_path / "flower", "flower"), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    flower = tmp_path / "flower" / "small" / "fedbn" / "rot45" / "seed0"
    pd.testing.assert_frame_equal(numbers(flower / "rounds.csv"), numbers(inline / "rounds.csv"), rtol=1e-4)
    assert not processes_with("fedsim-flower-")


@pytest.mark.flower
def test_a_failing_run_in_flowers_engine_exits_1(tmp_path):
    """`flwr run` itself would exit with 0."""
    experiment = small_experiment(tmp_path)
    words = ["--set", "run.timeout=0.001"]  # no reply is that quick
    done = subprocess.run(command(experiment, tmp_path, "flower", *words), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Flower's run ended as finished:failed" in done.stderr
    assert not processes_with("fedsim-flower-")


@pytest.mark.flower
def test_flwr_run_from_the_repository(tmp_path):
    """`flwr run . --stream`, as in the README, uses pyproject's settings, which the run config overrides."""
    from fedsim.flower.processes import SuperLink

    words = ["train.rounds=2", "data.fraction=0.1", "run.device=cpu"]
    inline, _ = run_small(complete(read_experiment("digits", [*words, f"run.output={tmp_path / 'inline'}"])))
    config = f"experiment='digits' method='fedavg' seed=0 output='{tmp_path / 'flwr'}' overrides='{' '.join(words)}'"
    run = [BIN / "flwr", "run", ".", "--stream", "--run-config", config]
    nodes = ["--federation-config", "num-supernodes=5 client-resources-num-cpus=1"]
    with SuperLink(tmp_path, {}) as link:
        subprocess.run([*run, *nodes], cwd=ROOT, env=link.environment, check=True, capture_output=True)
    flwr = tmp_path / "flwr" / "digits" / "fedavg" / "rot75" / "seed0"
    pd.testing.assert_frame_equal(numbers(flwr / "rounds.csv"), numbers(inline / "rounds.csv"), rtol=1e-4)
