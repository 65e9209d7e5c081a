"""A real federation on this machine: SuperLink, three source sites and a target site, TLS, keys, kits and scripts."""

import functools
import json
import os
import shlex
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
import tomli_w
from harness import SMALL, SOURCES, TARGET, Loopback, run_folder, run_inline
from outcomes import statuses
from processes import until
from support import numbers

from fedsim.deploy.control import Control
from fedsim.deploy.federation import CONNECTION

ROOT = Path(__file__).parents[2]
THREE = {"train.rounds": 3}
MASKS = {
    "data.dataset": "digit-masks",
    "data.domains": '["inverted", "noise", "shaded", "textured"]',
    "data.fraction": 0.05,
    "data.split": "random",
    "model.backbone": "unet-small",
    "run.target": "textured",
}
METHODS = {  # settings, sources, target
    "fedavg": ({}, SOURCES, TARGET),
    "fada": ({}, SOURCES, TARGET),  # the target trains
    "elcfs": (MASKS, ("inverted", "noise", "shaded"), "textured"),  # segmentation
}
SECURE = {"method.fuse": "secure_mean", "run.update_limit": 0, "run.on_client_failure": "continue"}
pytestmark = pytest.mark.deployment


def same(deployed, inline, atol=1e-4, columns=()):
    """Whether the numbers of two rounds.csv agree: those of these columns, or all but bytes."""
    ours, theirs = (numbers(folder / "rounds.csv") for folder in (deployed, inline))
    columns = list(columns) or [name for name in theirs if not name.startswith("bytes")]
    pd.testing.assert_frame_equal(ours[columns], theirs[columns], rtol=0, atol=atol)


@pytest.mark.parametrize("method", METHODS)
def test_a_deployed_run_gives_the_numbers_of_inline(method, tmp_path):
    settings, sources, target = METHODS[method]
    inline = run_inline(tmp_path / "inline", method, **settings)
    with Loopback(tmp_path, sources=sources, unseen=target) as federation:
        for _ in range(2):  # a starved SuperLink loses messages: its SQLite gives up on a lock after five seconds
            done = federation.run(tmp_path / "out", method, **settings, **{"run.timeout": 120})
            if done.returncode != 1:
                break
            federation.stop("server")
            federation.start("server")
    assert done.returncode == 0, done.stderr
    deployed = run_folder(tmp_path / "out", method, target)
    same(deployed, inline, 1e-4 if method == "fedavg" else 1e-5)
    assert set(statuses(deployed)) == {"ok"}
    assert set(statuses(deployed).index.get_level_values("client")) == {*sources, target}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """One federation for all tests of this module; without pins, as a plain `flwr run` submits the repository."""
    with Loopback(tmp_path_factory.mktemp("federation"), settings={"pin": False}) as running:
        yield running


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    """Folder of the same experiment in one process, by method."""
    output = tmp_path_factory.mktemp("inline")
    return functools.cache(lambda method: run_inline(output / method, method, **THREE))


def rounds_done(folder):
    file = folder / "rounds.csv"
    return len(file.read_text().splitlines()) - 1 if file.is_file() else 0


def interrupted(federation, output, method, after, number):
    """A deployed run of three rounds whose command gets a signal when some are recorded: exit code, words, folder."""
    process, folder = federation.begin(output, method, **THREE), run_folder(output, method)
    until(lambda: rounds_done(folder) >= after or process.poll() is not None, 240, "round")
    os.killpg(process.pid, number)
    return process.communicate(timeout=120)[1], process.returncode, folder


def completed(federation, *words, **settings):
    done = federation.run(*words, **settings)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_stops_the_run_and_the_same_command_continues_it(federation, inline, tmp_path):
    """Nothing runs in the federation any more, and the sites keep their clients' state."""
    said, code, folder = interrupted(federation, tmp_path, "fedbn", 2, signal.SIGINT)
    assert code == 130, said
    assert "the same command continues" in said
    before = rounds_done(folder)
    time.sleep(8)
    assert rounds_done(folder) == before < 4
    completed(federation, tmp_path, "fedbn", **THREE)
    same(folder, inline("fedbn"))


def test_a_killed_command_leaves_the_run_going_and_follows_it_when_called_again(federation, inline, tmp_path):
    *_, folder = interrupted(federation, tmp_path, "fedavg", 1, signal.SIGKILL)
    run_id = json.loads((folder / "deployment.json").read_text())["run"]
    completed(federation, tmp_path, **THREE)
    assert json.loads((folder / "deployment.json").read_text())["run"] == run_id
    same(folder, inline("fedavg"))


def test_a_failed_run_exits_1_with_the_clients_name_and_traceback(federation, tmp_path):
    federation.break_site("raise", round=1)
    done = federation.run(tmp_path, **{"run.on_client_failure": "stop"})
    assert done.returncode == 1
    assert "client 'rot15' failed in round 1" in done.stderr
    assert "told to raise" in done.stderr


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("fedavg", {"run.federation": "nowhere.toml"}, "cannot read the federation file"),
        ("fedavg", {"data.domains": '["rot0", "rot15", "rot30", "rot45", "rot60"]'}, "no site holds rot60"),
        ("fedavg", {"run.target": "rot30"}, "no site holds rot45"),
        ("deepall", {}, "cannot be deployed"),
    ],
)
def test_bad_input_exits_2_before_anything_is_submitted(federation, tmp_path, method, settings, said):
    done = federation.run(tmp_path, method, **settings)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert method == "deepall" or not (tmp_path / "small").exists()


def test_plain_flwr_run_in_the_repository_works_too(federation, inline, tmp_path):
    words = {**SMALL, **THREE, "run.evaluate_target": "site"}
    overrides = " ".join(shlex.quote(f"{key}={value}") for key, value in words.items())
    settings = tmp_path / "settings.toml"
    settings.write_text(tomli_w.dumps({"experiment": "digits", "output": str(tmp_path), "overrides": overrides}))
    started = Control(federation.federation).flwr("run", str(ROOT), CONNECTION, "--run-config", str(settings))
    assert started.get("success"), started
    folder = run_folder(tmp_path)
    until((folder / "summary.csv").is_file, 240, "end of the run")
    same(folder, inline("fedavg"))


def test_a_secure_sum_is_the_inline_mean_also_without_a_site_that_fails(federation, tmp_path):
    """Two rounds; then a run in which a site fails in round 1 after it has sent its shares, and returns later."""
    inline = run_inline(tmp_path / "inline", **{"run.update_limit": 0})
    completed(federation, tmp_path / "out", **SECURE)
    folder = run_folder(tmp_path / "out", "fedavg@fuse=secure_mean")
    same(folder, inline, columns=["mean_validation_loss", "target_loss"])
    assert set(statuses(folder)) == {"ok"}
    kept = list(federation.folder.glob("**/secure-mean.json"))
    assert [file.stat().st_mode & 0o777 for file in kept] == [0o600] * 3
    for file in kept:
        assert set(json.loads(json.loads(file.read_text())["text"])) == {"answered", "answer"}
    federation.break_site("raise", round=1)
    completed(federation, tmp_path / "broken", **SECURE)
    broken = run_folder(tmp_path / "broken", folder.parents[1].name)
    assert "told to raise" in statuses(broken)[1, "rot15"]
    weights = pd.read_csv(broken / "clients.csv").set_index(["round", "client"])["weight"]
    assert weights[1, "rot0"] + weights[1, "rot30"] == pytest.approx(1)
    assert weights[2, "rot15"] > 0
