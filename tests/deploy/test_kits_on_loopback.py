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
from support import free_ports

from fedsim.common.errors import UserError
from fedsim.deploy.control import Control, register, registered_nodes
from fedsim.deploy.federation import Federation, read_federation
from fedsim.deploy.kits import init, is_locked

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
BIN = Path(sys.executable).parent
DOMAINS = 'data.domains=["rot0", "rot45"]'
pytestmark = pytest.mark.deployment


def script(kit: Path, name: str) -> subprocess.CompletedProcess:
    """Run a kit's script to its end, with this environment's tools in PATH."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run([kit / name], env=environment, capture_output=True, text=True, timeout=180)


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
    return read_federation(file)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server with one site; everything is stopped by the kits' own scripts, and nothing is left."""
    federation = write_federation(tmp_path_factory.mktemp("a federation"))
    init(federation)
    try:
        for kit in ("server", "alpha"):
            started = script(federation.kit(kit), "start.sh")
            assert started.returncode == 0, started.stdout + started.stderr
        yield federation
    finally:
        stopped = [script(federation.kit(kit), "stop.sh") for kit in ("alpha", "delta", "server")]
    assert [done.returncode for done in stopped] == [0, 0, 0], stopped
    deadline = time.monotonic() + 60  # Flower's helpers notice that their parent is gone
    while (left := processes_in(federation.kits)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []


def processes_in(folder: Path) -> list[str]:
    """Command lines of processes that work in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(folder):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def request(federation: Federation, port: int, method: str, path: str) -> int:
    """HTTP status of a request with the federation's CA, the path sent as it is."""
    context = ssl.create_default_context(cafile=federation.ca_certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
    connection.request(method, path, body=b"" if method == "POST" else None)
    return connection.getresponse().status


def test_the_site_is_online_under_its_name(federation):
    """As the SuperLink sees it; the other one is registered and offline."""
    online = Control(federation).online()
    nodes = registered_nodes(federation)
    assert {name: online[node] for name, node in nodes.items()} == {"alpha": True, "delta": False}


def test_starting_again_changes_nothing(federation):
    """Neither a second SuperLink nor a second SuperNode nor another registration."""
    before = registered_nodes(federation)
    assert "superlink is running" in script(federation.kit("server"), "start.sh").stdout
    assert "alpha is running" in script(federation.kit("alpha"), "start.sh").stdout
    assert registered_nodes(federation) == before


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
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


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_a_site_cannot_use_the_control_path(federation, tmp_path):
    """`flwr` with a site's CA certificate and the public address: refused."""
    control = Control(federation)
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "{federation.public_address}"\n'
        f'root-certificates = "{federation.kit("alpha") / "ca.crt"}"\n'
    )
    control.environment["FLWR_HOME"] = str(tmp_path)
    answer = control.flwr("list", "x")
    assert not answer["success"]
    assert "403" in answer["error-message"]


def check(federation: Federation, *words: str) -> subprocess.CompletedProcess:
    """`fedsim deploy check` as the operator calls it, with the toml of the server's kit."""
    file = federation.kit("server") / "federation.toml"
    environment = {**os.environ, "COLUMNS": "200"}
    command = [BIN / "fedsim", "deploy", "check", *words, "--federation", file, "--wait", "60"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_the_check_names_the_site_that_is_offline(federation):
    """delta was never started: exit code 2, its reason, and what alpha holds."""
    done = check(federation, "digits", "--set", DOMAINS)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "delta: offline: call its start.sh" in done.stdout
    assert "1000" in done.stdout
    assert "in 10 classes" in done.stdout
    assert "alpha:" not in done.stdout


def test_the_check_is_content_with_a_complete_federation(federation):
    """All sites online; then with an experiment that wants more domains than there are sites."""
    started = script(federation.kit("delta"), "start.sh")
    assert started.returncode == 0, started.stdout + started.stderr
    done = check(federation, "digits", "--set", DOMAINS)
    assert done.returncode == 0, done.stdout + done.stderr
    done = check(federation, "digits", "--set", 'data.domains=["rot0", "rot15", "rot45"]')
    assert done.returncode == 2
    assert "no site holds 'rot15', which the experiment trains on" in done.stdout


def test_a_stopped_site_starts_again_at_once(federation):
    """SIGTERM leaves the federation, so its key is free."""
    began = time.monotonic()
    assert script(federation.kit("alpha"), "stop.sh").stdout == "stopped\n"
    assert script(federation.kit("alpha"), "stop.sh").stdout == "not running\n"
    started = script(federation.kit("alpha"), "start.sh")
    assert started.returncode == 0, started.stdout + started.stderr
    assert time.monotonic() - began < 60


def test_a_restarted_server_finds_its_sites_again(federation):
    """The database keeps the keys; the sites reconnect by themselves."""
    nodes = registered_nodes(federation)
    assert script(federation.kit("server"), "stop.sh").returncode == 0
    started = script(federation.kit("server"), "start.sh")
    assert started.returncode == 0, started.stdout + started.stderr
    assert registered_nodes(federation) == nodes
    deadline = time.monotonic() + 90
    while not Control(federation).online()[nodes["alpha"]] and time.monotonic() < deadline:
        time.sleep(1)
    assert Control(federation).online()[nodes["alpha"]]
    assert is_locked(federation.kit("alpha") / "run" / "lock")


@pytest.mark.slow
def test_a_killed_supernode_comes_back(federation):
    """SIGKILL: the key is refused while the node counts as online, then taken."""
    kit = federation.kit("alpha")
    log = kit / "run" / "supernode.log"
    env = (kit / "site.env").read_text()
    script(kit, "stop.sh")
    (kit / "site.env").write_text(env.replace("TRIES=2", "TRIES=60"))
    assert script(kit, "start.sh").returncode == 0
    before = log.stat().st_size
    os.kill(int((kit / "run" / "supernode.pid").read_text()), signal.SIGKILL)
    deadline = time.monotonic() + 150
    while "SuperNode ID:" not in log.read_text()[before:] and time.monotonic() < deadline:
        time.sleep(1)
    (kit / "site.env").write_text(env)
    said = log.read_text()[before:]
    assert "next attempt in 2 s: the SuperNode was killed (signal 9)" in said
    assert "next attempt in 2 s: the server refuses this site's key" in said
    assert "SuperNode ID:" in said


def given_up(federation: Federation, name: str) -> str:
    """What a site's start script says when its attempts are refused."""
    kit = federation.kit(name)
    log = kit / "run" / "supernode.log"
    before = log.stat().st_size if log.exists() else 0
    done = script(kit, "start.sh")
    assert done.returncode == 1
    deadline = time.monotonic() + 120
    while is_locked(kit / "run" / "lock") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not is_locked(kit / "run" / "lock")
    return next(line for line in log.read_text()[before:].splitlines() if "gave up" in line)


def test_a_site_that_is_shut_out_gives_up_and_comes_back_with_a_new_key(federation):
    """The reason after `tries` attempts; its old key is never taken again."""
    kit = federation.kit("delta")
    script(kit, "stop.sh")
    public = federation.kit("server") / "sites" / "delta.pub"
    key = public.read_text()
    public.unlink()
    assert register(federation).keys() == {"alpha"}
    last = given_up(federation, "delta")
    assert "gave up after 2 attempts: the server refuses this site's key: it is not registered" in last
    public.write_text(key)
    with pytest.raises(UserError, match="site 'delta': its key was registered before and then removed"):
        register(federation)
    shutil.rmtree(kit)
    assert init(federation, add=True) == [kit]
    assert register(federation).keys() == {"alpha", "delta"}
    started = script(kit, "start.sh")
    assert started.returncode == 0, started.stdout + started.stderr


def test_a_server_of_another_federation_is_refused(federation, tmp_path):
    """A CA certificate that does not fit: no connection, and the site says why."""
    script(federation.kit("delta"), "stop.sh")
    kit = federation.kit("delta")
    own = (kit / "ca.crt").read_text()
    other = write_federation(tmp_path)
    init(other)
    shutil.copy(other.ca_certificate, kit / "ca.crt")
    last = given_up(federation, "delta")
    (kit / "ca.crt").write_text(own)
    assert "does not fit ca.crt or that name" in last
