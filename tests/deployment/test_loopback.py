"""Real federations on this machine: SuperLink, source sites and a target site, TLS, keys, kits and scripts."""

import http.client
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import time
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import tomli_w
from harness import ENVIRONMENT, FEDSIM, NGINX, SOURCES, TARGET, Loopback, run_folder, run_inline
from image_trees import write_tree
from machines import AVAILABLE, PORT, SERVER, Machines
from outcomes import statuses
from processes import command_lines, until
from support import numbers

import fedsim.deploy
from fedsim.common.errors import UserError
from fedsim.common.tables import MISSING
from fedsim.deploy.certificates import write_ca
from fedsim.deploy.control import Control, register, registered_nodes
from fedsim.deploy.kits import init, is_locked

THREE = {"train.rounds": 3}


def same(deployed, inline, columns=()):
    """Whether the numbers of two rounds.csv agree: those of these columns, or all but bytes."""
    ours, theirs = (numbers(folder / "rounds.csv") for folder in (deployed, inline))
    columns = list(columns) or [name for name in theirs if not name.startswith("bytes")]
    pd.testing.assert_frame_equal(ours[columns], theirs[columns], rtol=0, atol=1e-4)


def completed(federation, *words, **settings):
    done = federation.run(*words, **settings)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """After the kits' own stop.sh nothing is left."""
    folder = tmp_path_factory.mktemp("a federation")  # people's folders have blanks
    with Loopback(folder, settings={"retry_seconds": 2}, nginx=True) as running:
        yield running
    until(lambda: not command_lines(running.federation.kits), 60, "end")  # Flower's helpers notice it


def interrupted(federation, output, method, after, number):
    """A deployed run of three rounds whose command gets a signal when some are recorded: exit code, words, folder."""
    process, folder = federation.begin(output, method, **THREE), run_folder(output, method)
    until(lambda: rounds_done(folder) >= after or process.poll() is not None, 240, "round")
    assert process.poll() is None, process.communicate()[1]
    os.killpg(process.pid, number)
    return process.communicate(timeout=120)[1], process.returncode, folder


def given_up(federation, site):
    """What the log of a site says that has two attempts and is refused."""
    before, kit = len(federation.log(site)), federation.federation.kit(site)
    federation.rewrite(site, "TRIES=0", "TRIES=2")
    federation.start(site, 1)
    until(lambda: not is_locked(kit / "run" / "lock"), 120, "end of the attempts")
    federation.rewrite(site, "TRIES=2", "TRIES=0")
    return federation.log(site)[before:]


def rounds_done(folder):
    file = folder / "rounds.csv"
    return len(file.read_text().splitlines()) - 1 if file.is_file() else 0


@pytest.mark.deployment
def test_ctrl_c_stops_the_run_and_the_same_command_continues_it(federation, tmp_path):
    """Nothing runs in the federation any more, and the sites keep their clients' state."""
    said, code, folder = interrupted(federation, tmp_path, "fedbn", 2, signal.SIGINT)
    assert code == 130, said
    assert "the same command continues" in said
    before = rounds_done(folder)
    time.sleep(8)
    assert rounds_done(folder) == before < 4
    completed(federation, tmp_path, "fedbn", **THREE)
    same(folder, run_inline(tmp_path / "inline", "fedbn", **THREE))


@pytest.mark.deployment
def test_a_killed_command_leaves_the_run_going_and_follows_it_when_called_again(federation, tmp_path):
    """With a method whose target site trains."""
    *_, folder = interrupted(federation, tmp_path, "fada", 1, signal.SIGKILL)
    run_id = json.loads((folder / "deployment.json").read_text())["run"]
    completed(federation, tmp_path, "fada", **THREE)
    assert json.loads((folder / "deployment.json").read_text())["run"] == run_id
    same(folder, run_inline(tmp_path / "inline", "fada", **THREE))
    assert set(statuses(folder)) == {"ok"}
    assert set(statuses(folder).index.get_level_values("client")) == {*SOURCES, TARGET}


@pytest.mark.deployment
def test_a_finished_run_goes_on_for_more_rounds(federation, tmp_path):
    """The sites still have their clients' state, and the command does not take the finished run for the longer one."""
    kept = {"run.keep_state": "true"}
    completed(federation, tmp_path, "fedbn", **{"train.rounds": 1, **kept})
    completed(federation, tmp_path, "fedbn", **{**THREE, **kept})
    folder = run_folder(tmp_path, "fedbn")
    assert rounds_done(folder) == 4
    assert pd.read_csv(folder / "summary.csv")["rounds"].item() == 3
    same(folder, run_inline(tmp_path / "inline", "fedbn", **THREE))


@pytest.mark.deployment
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


@pytest.mark.deployment
def test_a_secure_sum_is_the_inline_mean(federation, tmp_path):
    inline = run_inline(tmp_path / "inline", **{"run.update_limit": 0})
    completed(federation, tmp_path / "out", **{"method.fuse": "secure_mean", "run.update_limit": 0})
    same(run_folder(tmp_path / "out", "fedavg@fuse=secure_mean"), inline, ["mean_validation_loss", "target_loss"])
    kept = list(federation.folder.glob("**/secure-mean.json"))
    assert [file.stat().st_mode & 0o777 for file in kept] == [0o600] * 3
    for file in kept:
        assert set(json.loads(json.loads(file.read_text())["text"])) == {"answered", "answer"}


@pytest.mark.deployment
def test_compressed_updates_arrive_as_they_are_counted(federation, tmp_path):
    """With the draws of one process and the errors of one process, which the sites keep."""
    for name in ("quantized", "top_k"):
        settings = {**THREE, "method.compress": name}
        run_inline(tmp_path / "inline", "fedbn", **settings)
        completed(federation, tmp_path / "out", "fedbn", **settings)
        inline, deployed = (run_folder(tmp_path / output, f"fedbn@compress={name}") for output in ("inline", "out"))
        same(deployed, inline)
        columns = ["round", "client", "bytes_up"]
        ours, theirs = (pd.read_csv(folder / "clients.csv") for folder in (deployed, inline))
        sources = ours[ours["client"].isin(SOURCES)]
        assert sources[columns].to_dict("list") == theirs[columns].to_dict("list")


@pytest.mark.deployment
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_only_the_sites_paths_are_open_to_the_outside(federation):
    """Whatever the spelling; the same SuperLink answers on its loopback port."""
    described = federation.federation

    def status(port, method, path):
        context = ssl.create_default_context(cafile=described.ca_certificate)
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
        connection.request(method, path, body=b"" if method == "POST" else None)
        return connection.getresponse().status

    for path in ("/health", "/openapi.json", "/v1/fleet/pull-messages"):
        assert status(described.port, "GET", path) == 403
    assert status(described.port, "POST", "/v1/runtime/pull-task") == 403
    for path in ("/v1/", "//v1/", "/v1/fleet/../", "/v1/fleet/%2e%2e/", "/v1/fleet/..%2f"):
        assert status(described.port, "POST", f"{path}control/list-runs") == 403
    assert status(described.port, "POST", "/v1/Control/list-runs") == 403
    assert status(described.control_port, "GET", "/health") == 200


@pytest.mark.deployment
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_a_site_cannot_use_the_control_path_with_its_ca_certificate(federation, tmp_path):
    control, described = Control(federation.federation), federation.federation
    link = {"address": described.public_address, "root-certificates": str(described.kit(f"site-{TARGET}") / "ca.crt")}
    (tmp_path / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "x", "x": link}}))
    control.environment["FLWR_HOME"] = str(tmp_path)
    answer = control.flwr("list", "x")
    assert not answer["success"]
    assert "403" in answer["error-message"]


@pytest.mark.deployment
def test_sites_and_server_stop_and_start_and_who_is_shut_out_comes_back_with_a_new_key(federation, monkeypatch):
    """SIGTERM leaves the federation, so the site's key is free at once."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on many machines for continuous integration
    described, site, nodes = federation.federation, f"site-{TARGET}", registered_nodes(federation.federation)
    assert "superlink is running" in federation.start("server").stdout
    began = time.monotonic()
    assert [federation.stop(site) for _ in range(2)] == ["stopped\n", "not running\n"]
    federation.start(site)
    assert time.monotonic() - began < 60
    federation.stop("server")
    federation.start("server")
    assert registered_nodes(described) == nodes
    until(lambda: all(Control(described).online()[node] for node in nodes.values()), 90, "sites")
    federation.stop(site)
    public = described.kit("server") / "sites" / f"{site}.pub"
    key = public.read_text()
    public.unlink()
    assert register(described).keys() == nodes.keys() - {site}
    said = "gave up after 2 attempts: the server refuses this site's key: it is not registered"
    assert said in given_up(federation, site)
    public.write_text(key)
    with pytest.raises(UserError, match=f"site '{site}': its key was registered before and then removed"):
        register(described)
    shutil.rmtree(described.kit(site))
    assert init(described, add=True) == [described.kit(site)]
    assert register(described).keys() == nodes.keys()
    federation.start(site)


@pytest.mark.deployment
def test_a_site_does_not_connect_to_a_server_of_another_federation(federation, tmp_path):
    site = f"site-{TARGET}"
    own = federation.federation.kit(site) / "ca.crt"
    federation.stop(site)
    write_ca("demo", 30, tmp_path / "ca.key", tmp_path / "ca.crt")
    shutil.copy(tmp_path / "ca.crt", own)
    said = given_up(federation, site)
    shutil.copy(federation.federation.ca_certificate, own)
    assert "does not fit ca.crt or that name" in said
    federation.start(site)


@pytest.mark.deployment
def test_in_deploy_pages_example_the_server_needs_names_and_no_images(tmp_path):
    """Without the names of the classes the check says which lines are missing; with them it holds, and the run ends."""
    page = (Path(fedsim.deploy.__file__).parent / "DEPLOY.md").read_text()
    section = page[page.index("## 7. A whole example") : page.index("## 8.")]
    table, experiment = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", section, re.S)]
    (tmp_path / "hospitals.toml").write_text(tomli_w.dumps(experiment))
    lacking = {**experiment, "data": {**experiment["data"], "domains": [], "classes": []}}
    (tmp_path / "lacking.toml").write_text(tomli_w.dumps(lacking))
    names = [site["name"] for site in table["sites"]]
    for number, name in enumerate(names):
        write_tree(tmp_path / "sites" / name, [name], experiment["data"]["classes"], 8, seed=100 * number)
    data = {name: str(tmp_path / "sites" / name) for name in names}
    with Loopback(tmp_path, sources=tuple(names[:2]), unseen=names[2], data=data, warm=False):

        def fedsim_here(*words):
            own = {"cwd": tmp_path, "env": {**ENVIRONMENT, "COLUMNS": "400"}, "timeout": 900}
            words = [*FEDSIM, *words, "--federation", "federation.toml"]
            done = subprocess.run(words, text=True, capture_output=True, **own)
            return done.returncode, done.stdout + done.stderr

        code, said = fedsim_here("deploy", "check", "lacking.toml")
        assert code == 2
        assert 'data.domains = ["bern", "geneva", "zurich"] and data.classes = ["benign", "malignant"]' in said
        code, said = fedsim_here("deploy", "check", "hospitals.toml", "--statistics", "9")
        assert code == 0, said
        lines = [" ".join(line.split()) for line in said.splitlines()]
        assert {"benign < 9 < 9 < 9", "malignant < 9 < 9 < 9"} <= set(lines)  # eight images of each class at each site
        channels = [line.split(maxsplit=2)[2] for line in lines if line.startswith("channel ")]
        assert len(channels) == 3
        for numbers_of_sites in channels:  # the site of the unseen domain says nothing
            assert re.fullmatch(rf"(0\.\d+ ± 0\.\d+ ){{2}}{MISSING}", numbers_of_sites)
        quick = ["--set", "train.rounds=1", "--set", "run.device=cpu", "--set", "run.timeout=600"]
        code, said = fedsim_here("run", "hospitals.toml", "--runtime", "deployment", "--method", "feddg-ga", *quick)
        assert code == 0, said
    rounds = pd.read_csv(tmp_path / "outputs/hospitals/feddg-ga/zurich/seed0/rounds.csv")
    assert list(rounds["round"]) == [0, 1]


@pytest.mark.namespaces
@pytest.mark.skipif(not AVAILABLE, reason="needs root and ip (iproute2)")
def test_separate_machines_give_the_numbers_of_inline(tmp_path):
    """Three rounds over TLS with keys; only the target site has the target's images, and no site reaches another."""
    settings = {**THREE, "method.cross_client_style.encoder": "pixel"}
    inline = run_inline(tmp_path / "inline", "ccst", **settings)
    with Machines(tmp_path) as machines:
        completed(machines, tmp_path / "out", "ccst", **settings)
        others = machines.federation.site("site-rot15").port
        for address, port, code in ((SERVER, PORT, 0), ("10.77.0.3", others, 1)):
            words = [*machines.inside("site-rot0"), "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]
            assert subprocess.run(words, capture_output=True).returncode == code
    same(run_folder(tmp_path / "out", "ccst"), inline, ["round", "mean_validation_accuracy", "target_accuracy"])
