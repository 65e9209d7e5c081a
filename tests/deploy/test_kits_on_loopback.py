"""Kits at work on loopback: a SuperLink behind nginx, SuperNodes with keys, restarts, refusals, the check."""

import http.client
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo import NGINX, edit
from processes import command_lines, until
from support import free_ports

from fedsim.common.errors import UserError
from fedsim.deploy.control import Control, register, registered_nodes
from fedsim.deploy.federation import Federation, read_federation
from fedsim.deploy.kits import init, is_locked

BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "200"}
behind_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
pytestmark = pytest.mark.deployment


def script(kit: Path, name: str, code: int | None = 0) -> str:
    """What a kit's script says, with this environment's tools in PATH."""
    done = subprocess.run([kit / name], env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done.stdout


def write_federation(folder: Path) -> Federation:
    """One source site and one target site; folder names with blanks, as people have them."""
    public, control, alpha, delta = free_ports(4)
    file = folder / "federation.toml"
    file.write_text(
        f'name = "demo"\naddress = "127.0.0.1"\nport = {public}\n'
        + (f'proxy = "nginx"\ncontrol = "127.0.0.1:{control}"\n' if NGINX else 'proxy = "none"\n')
        + f"retry_seconds = 2\ntries = 2\n"
        f'[[sites]]\nname = "alpha"\ndomain = "rot0"\nport = {alpha}\nstate_dir = "{folder}/state of alpha"\n'
        f'[[sites]]\nname = "delta"\ndomain = "rot45"\nrole = "target"\nport = {delta}\n'
    )
    federation = read_federation(file)
    init(federation)
    return federation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server with one site; everything is stopped by the kits' own scripts, and nothing is left."""
    federation = write_federation(tmp_path_factory.mktemp("a federation"))
    try:
        for kit in ("server", "alpha"):
            script(federation.kit(kit), "start.sh")
        yield federation
    finally:
        for kit in ("alpha", "delta", "server"):
            script(federation.kit(kit), "stop.sh")
    until(lambda: not command_lines(federation.kits), 60, "end")  # Flower's helpers notice that their parent is gone


def request(federation: Federation, port: int, method: str, path: str) -> int:
    """HTTP status of a request with the federation's CA, the path sent as it is."""
    context = ssl.create_default_context(cafile=federation.ca_certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
    connection.request(method, path, body=b"" if method == "POST" else None)
    return connection.getresponse().status


def test_the_site_is_online_under_its_name_and_starting_again_changes_nothing(federation):
    nodes, online = registered_nodes(federation), Control(federation).online()
    assert {name: online[node] for name, node in nodes.items()} == {"alpha": True, "delta": False}
    assert "superlink is running" in script(federation.kit("server"), "start.sh")
    assert "alpha is running" in script(federation.kit("alpha"), "start.sh")
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
        f'root-certificates = "{federation.kit("alpha") / "ca.crt"}"\n'
    )
    control.environment["FLWR_HOME"] = str(tmp_path)
    answer = control.flwr("list", "x")
    assert not answer["success"]
    assert "403" in answer["error-message"]


def check(federation: Federation, code: int, domains: str = '"rot0", "rot45"') -> str:
    """What `fedsim deploy check` says to the operator, with the toml of the server's kit."""
    file = federation.kit("server") / "federation.toml"
    words = ["digits", "--set", f"data.domains=[{domains}]", "--federation", file, "--wait", "60"]
    done = subprocess.run(
        [BIN / "fedsim", "deploy", "check", *words], capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_check_names_the_site_that_is_offline_and_is_content_with_a_complete_federation(federation):
    said = check(federation, 2)
    assert "delta: offline: call its start.sh" in said
    assert "1000" in said
    assert "in 10 classes" in said
    assert "alpha:" not in said
    script(federation.kit("delta"), "start.sh")
    check(federation, 0)
    assert "no site holds 'rot15', which the experiment trains on" in check(federation, 2, '"rot0", "rot15", "rot45"')


def test_a_stopped_site_starts_again_at_once(federation):
    """SIGTERM leaves the federation, so its key is free."""
    began = time.monotonic()
    assert script(federation.kit("alpha"), "stop.sh") == "stopped\n"
    assert script(federation.kit("alpha"), "stop.sh") == "not running\n"
    script(federation.kit("alpha"), "start.sh")
    assert time.monotonic() - began < 60


def test_a_restarted_server_has_its_keys_and_finds_its_sites_again(federation):
    nodes = registered_nodes(federation)
    for name in ("stop.sh", "start.sh"):
        script(federation.kit("server"), name)
    assert registered_nodes(federation) == nodes
    until(lambda: Control(federation).online()[nodes["alpha"]], 90, "site")
    assert is_locked(federation.kit("alpha") / "run" / "lock")


@pytest.mark.slow
def test_a_killed_supernode_comes_back(federation):
    """Its key is refused while the node counts as online, then taken."""
    kit = federation.kit("alpha")
    log = kit / "run" / "supernode.log"
    script(kit, "stop.sh")
    edit(kit / "site.env", "TRIES=2", "TRIES=60")
    script(kit, "start.sh")
    before = log.stat().st_size
    os.kill(int((kit / "run" / "supernode.pid").read_text()), signal.SIGKILL)
    until(lambda: "SuperNode ID:" in log.read_text()[before:], 150, "SuperNode")
    edit(kit / "site.env", "TRIES=60", "TRIES=2")
    for reason in ("the SuperNode was killed (signal 9)", "the server refuses this site's key"):
        assert f"next attempt in 2 s: {reason}" in log.read_text()[before:]


def given_up(federation: Federation, name: str) -> str:
    """What a site's start script says when its attempts are refused."""
    kit = federation.kit(name)
    log = kit / "run" / "supernode.log"
    before = log.stat().st_size if log.exists() else 0
    script(kit, "start.sh", 1)
    until(lambda: not is_locked(kit / "run" / "lock"), 120, "end of the attempts")
    return next(line for line in log.read_text()[before:].splitlines() if "gave up" in line)


def test_a_site_that_is_shut_out_gives_up_and_comes_back_with_a_new_key(federation):
    kit = federation.kit("delta")
    script(kit, "stop.sh")
    public = federation.kit("server") / "sites" / "delta.pub"
    key = public.read_text()
    public.unlink()
    assert register(federation).keys() == {"alpha"}
    said = "gave up after 2 attempts: the server refuses this site's key: it is not registered"
    assert said in given_up(federation, "delta")
    public.write_text(key)
    with pytest.raises(UserError, match="site 'delta': its key was registered before and then removed"):
        register(federation)
    shutil.rmtree(kit)
    assert init(federation, add=True) == [kit]
    assert register(federation).keys() == {"alpha", "delta"}
    script(kit, "start.sh")


def test_a_site_does_not_connect_to_a_server_of_another_federation(federation, tmp_path):
    kit = federation.kit("delta")
    script(kit, "stop.sh")
    own = (kit / "ca.crt").read_text()
    shutil.copy(write_federation(tmp_path).ca_certificate, kit / "ca.crt")
    last = given_up(federation, "delta")
    (kit / "ca.crt").write_text(own)
    assert "does not fit ca.crt or that name" in last
