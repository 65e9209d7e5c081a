"""A real federation on this machine: SuperLink, three source sites and a target site, TLS, keys, kits and scripts."""

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest
import tomli_w
from harness import SMALL, SOURCES, Loopback, run_folder, run_inline, until
from support import numbers

from fedsim.deploy.control import Control
from fedsim.deploy.federation import CONNECTION

ROOT = Path(__file__).parents[2]
ACCURACIES = ["round", "mean_validation_accuracy", "target_accuracy"]


def same_accuracies(deployed, inline):
    """Whether the accuracies of two rounds.csv differ by at most 1e-4."""
    pd.testing.assert_frame_equal(
        numbers(deployed / "rounds.csv")[ACCURACIES], numbers(inline / "rounds.csv")[ACCURACIES], rtol=0, atol=1e-4
    )


def rounds_done(folder):
    """Number of rounds in rounds.csv, the initial model included."""
    file = folder / "rounds.csv"
    return len(file.read_text().splitlines()) - 1 if file.is_file() else 0


@pytest.mark.deployment
def test_a_deployed_run_gives_the_numbers_of_inline(tmp_path):
    """Everything works: kits, registration, handshake, two rounds, the target's evaluation, records, exit code 0."""
    inline = run_inline(tmp_path / "inline")
    with Loopback(tmp_path) as federation:
        done = federation.run(tmp_path / "out", **{"run.timeout": 120})
        if done.returncode == 1:  # a starved SuperLink loses messages: its SQLite gives up on a lock after five seconds
            federation.stop("server")
            federation.start("server")
            done = federation.run(tmp_path / "out", **{"run.timeout": 120})
    assert done.returncode == 0, done.stderr
    same_accuracies(run_folder(tmp_path / "out"), inline)
    clients = pd.read_csv(run_folder(tmp_path / "out") / "clients.csv")
    assert set(clients["status"]) == {"ok"}
    assert set(clients["client"]) == {*SOURCES, "rot45"}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """One federation for all tests of this module."""
    settings = {"pin": False}  # a plain `flwr run` submits the repository
    with Loopback(tmp_path_factory.mktemp("federation"), settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    """Folder of the same experiment in one process, by method."""
    output, made = tmp_path_factory.mktemp("inline"), {}

    def run(method):
        if method not in made:
            made[method] = run_inline(output / method, method, **{"train.rounds": 3})
        return made[method]

    return run


def begin(federation, output, method="fedavg", after=2, **settings):
    """Start a deployed run of three rounds and wait until some are recorded; process and run folder."""
    settings = {"train.rounds": 3, **settings}
    process = subprocess.Popen(
        federation.command(output, method, **settings),
        cwd=federation.folder,
        env=federation.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    folder = run_folder(output, method)
    until(lambda: rounds_done(folder) >= after or process.poll() is not None, 240, "round")
    return process, folder


@pytest.mark.deployment
def test_ctrl_c_stops_the_run_and_the_same_command_continues_it(federation, inline, tmp_path):
    """The exit code is 130, nothing runs in the federation any more, and the sites keep their clients' state."""
    process, folder = begin(federation, tmp_path, "fedbn")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "the same command continues" in said
    before = rounds_done(folder)
    time.sleep(8)
    assert rounds_done(folder) == before < 4
    done = federation.run(tmp_path, "fedbn", **{"train.rounds": 3})
    assert done.returncode == 0, done.stderr
    same_accuracies(folder, inline("fedbn"))


@pytest.mark.deployment
def test_a_killed_command_leaves_the_run_going_and_follows_it_when_called_again(federation, inline, tmp_path):
    """No second run is started in addition to the first."""
    process, folder = begin(federation, tmp_path, after=1)
    run_id = json.loads((folder / "deployment.json").read_text())["run"]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    done = federation.run(tmp_path, **{"train.rounds": 3})
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "deployment.json").read_text())["run"] == run_id
    same_accuracies(folder, inline("fedavg"))


@pytest.mark.deployment
def test_a_failed_run_exits_1_with_its_reason(federation, tmp_path):
    """The reason names the client and contains its own traceback."""
    fault = {"kind": "raise", "round": 1, "once": True, "seconds": 0}
    federation.fault_file("site-rot15").write_text(json.dumps(fault))
    done = federation.run(tmp_path, **{"run.on_client_failure": "stop"})
    assert done.returncode == 1
    assert "client 'rot15' failed in round 1" in done.stderr
    assert "told to raise" in done.stderr


@pytest.mark.deployment
def test_bad_input_exits_2_before_anything_is_submitted(federation, tmp_path):
    """Errors of the server have the same exit code."""
    for settings, said in (
        ({"run.federation": "nowhere.toml"}, "cannot read the federation file"),
        ({"data.domains": '["rot0", "rot15", "rot30", "rot45", "rot60"]'}, "no site holds rot60"),
        ({"run.target": "rot30"}, "no site holds rot45"),
    ):
        done = federation.run(tmp_path, **settings)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
    assert not (tmp_path / "small").exists()
    done = federation.run(tmp_path, "deepall")
    assert done.returncode == 2
    assert "cannot be deployed" in done.stderr


@pytest.mark.deployment
def test_plain_flwr_run_works_too(federation, inline, tmp_path):
    """It is started in the repository, with the operator's connection."""
    words = {**SMALL, "train.rounds": 3, "run.evaluate_target": "site"}
    overrides = " ".join(shlex.quote(f"{key}={value}") for key, value in words.items())
    settings = tmp_path / "settings.toml"
    settings.write_text(tomli_w.dumps({"experiment": "digits", "output": str(tmp_path), "overrides": overrides}))
    control = Control(federation.federation)
    started = control.flwr("run", str(ROOT), CONNECTION, "--run-config", str(settings))
    assert started.get("success"), started
    folder = run_folder(tmp_path)
    until(lambda: (folder / "summary.csv").is_file(), 240, "end of the run")
    same_accuracies(folder, inline("fedavg"))
