"""Kits at work on loopback: a SuperLink behind nginx, SuperNodes with keys, restarts, refusals, the check."""

import http.client
import shutil
import ssl
import subprocess
import time

import pytest
from harness import FEDSIM, NGINX, Loopback
from processes import command_lines, until

from fedsim.common.errors import UserError
from fedsim.deploy.certificates import write_ca
from fedsim.deploy.control import Control, register, registered_nodes
from fedsim.deploy.kits import init, is_locked

SOURCE, UNSEEN = "site-rot0", "site-rot45"
behind_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
pytestmark = pytest.mark.deployment


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server, a source site, and a target site that is not started; after the kits' own stop.sh nothing is left."""
    words = {"settings": {"retry_seconds": 2, "tries": 2}, "sources": ("rot0",), "warm": False, "nginx": True}
    with Loopback(tmp_path_factory.mktemp("a federation"), **words) as running:  # people's folders have blanks
        running.stop(UNSEEN)
        yield running
    # Flower's helpers notice that their parent is gone.
    until(lambda: not command_lines(running.federation.kits), 60, "end")


@pytest.fixture
def federation(running):
    return running.federation


def request(federation, port, method, path):
    """HTTP status of a request with the federation's CA, the path sent as it is."""
    context = ssl.create_default_context(cafile=federation.ca_certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
    connection.request(method, path, body=b"" if method == "POST" else None)
    return connection.getresponse().status


def test_the_site_is_online_under_its_name_and_starting_again_changes_nothing(running, federation):
    nodes, control = registered_nodes(federation), Control(federation)
    until(lambda: [control.online()[nodes[name]] for name in (SOURCE, UNSEEN)] == [True, False], 90, "end of a node")
    assert "superlink is running" in running.start("server").stdout
    assert f"{SOURCE} is running" in running.start(SOURCE).stdout
    assert registered_nodes(federation) == nodes


@behind_nginx
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/control/list-runs"),
        ("POST", "/v1/runtime/pull-task"),
        ("POST", "//v1/control/list-runs"),
        ("POST", "/v1/fleet/../control/list-runs"),
        ("POST", "/v1/fleet/%2e%2e/control/list-runs"),
        ("POST", "/v1/fleet/..%2fcontrol/list-runs"),
        ("POST", "/v1/Control/list-runs"),
        ("GET", "/v1/fleet/pull-messages"),
    ],
)
def test_only_the_sites_paths_are_open_to_the_outside(federation, method, path):
    """Whatever the spelling; the same SuperLink answers on its loopback port."""
    assert request(federation, federation.port, method, path) == 403
    assert request(federation, federation.control_port, "GET", "/health") == 200


@behind_nginx
def test_a_site_cannot_use_the_control_path_with_its_ca_certificate(federation, tmp_path):
    control = Control(federation)
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "{federation.public_address}"\n'
        f'root-certificates = "{federation.kit(SOURCE) / "ca.crt"}"\n'
    )
    control.environment["FLWR_HOME"] = str(tmp_path)
    answer = control.flwr("list", "x")
    assert not answer["success"]
    assert "403" in answer["error-message"]


def test_the_check_names_the_site_that_is_offline_and_is_content_with_a_complete_federation(running, federation):
    def check(code, domains='"rot0", "rot45"'):
        file = federation.kit("server") / "federation.toml"
        words = ["digits", "--set", f"data.domains=[{domains}]", "--federation", file, "--wait", "60"]
        environment = {**running.environment, "COLUMNS": "200"}
        command = [*FEDSIM, "deploy", "check", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    said = check(2)
    for words in (f"{UNSEEN}: offline: call its start.sh", "1000", "in 10 classes"):
        assert words in said
    assert f"{SOURCE}:" not in said
    running.start(UNSEEN)
    check(0)
    assert "no site holds 'rot15', which the experiment trains on" in check(2, '"rot0", "rot15", "rot45"')


def test_a_stopped_site_starts_again_at_once(running):
    """SIGTERM leaves the federation, so its key is free."""
    began = time.monotonic()
    assert [running.stop(SOURCE) for _ in range(2)] == ["stopped\n", "not running\n"]
    running.start(SOURCE)
    assert time.monotonic() - began < 60


def test_a_restarted_server_has_its_keys_and_finds_its_sites_again(running, federation):
    nodes = registered_nodes(federation)
    running.stop("server")
    running.start("server")
    assert registered_nodes(federation) == nodes
    until(lambda: Control(federation).online()[nodes[SOURCE]], 90, "site")
    assert is_locked(federation.kit(SOURCE) / "run" / "lock")


@pytest.mark.slow
def test_a_killed_supernode_comes_back(running):
    """Its key is refused while the node counts as online, then taken."""
    running.stop(SOURCE)
    running.rewrite(SOURCE, "TRIES=2", "TRIES=60")
    running.start(SOURCE)
    before = len(running.log(SOURCE))
    running.kill(SOURCE)
    until(lambda: "SuperNode ID:" in running.log(SOURCE)[before:], 150, "SuperNode")
    running.rewrite(SOURCE, "TRIES=60", "TRIES=2")
    for reason in ("the SuperNode was killed (signal 9)", "the server refuses this site's key"):
        assert f"next attempt in 2 s: {reason}" in running.log(SOURCE)[before:]


def given_up(running):
    """What the target site's log says when its attempts are refused."""
    before = len(running.log(UNSEEN))
    running.start(UNSEEN, 1)
    until(lambda: not is_locked(running.federation.kit(UNSEEN) / "run" / "lock"), 120, "end of the attempts")
    return next(line for line in running.log(UNSEEN)[before:].splitlines() if "gave up" in line)


def test_a_site_that_is_shut_out_gives_up_and_comes_back_with_a_new_key(running, federation):
    running.stop(UNSEEN)
    public = federation.kit("server") / "sites" / f"{UNSEEN}.pub"
    key = public.read_text()
    public.unlink()
    assert register(federation).keys() == {SOURCE}
    assert "gave up after 2 attempts: the server refuses this site's key: it is not registered" in given_up(running)
    public.write_text(key)
    with pytest.raises(UserError, match=f"site '{UNSEEN}': its key was registered before and then removed"):
        register(federation)
    shutil.rmtree(federation.kit(UNSEEN))
    assert init(federation, add=True) == [federation.kit(UNSEEN)]
    assert register(federation).keys() == {SOURCE, UNSEEN}
    running.start(UNSEEN)


def test_a_site_does_not_connect_to_a_server_of_another_federation(running, federation, tmp_path):
    running.stop(UNSEEN)
    write_ca("demo", 30, tmp_path / "ca.key", tmp_path / "ca.crt")
    shutil.copy(tmp_path / "ca.crt", federation.kit(UNSEEN) / "ca.crt")
    last = given_up(running)
    shutil.copy(federation.ca_certificate, federation.kit(UNSEEN) / "ca.crt")
    assert "does not fit ca.crt or that name" in last
