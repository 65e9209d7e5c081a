"""A federation in which the server and every site have their own network namespace, like separate machines.

Needs root and `ip` (Debian: iproute2). The namespaces are joined by a bridge in the server's; nothing leaves them.
"""

import os
import shutil
import subprocess

import pandas as pd
import pytest
from harness import ENVIRONMENT, SOURCES, TARGET, Loopback, command, run_folder, run_inline
from support import numbers

METHODS = {"fedavg": {}, "gperxan": {}, "ccst": {"method.cross_client_style.encoder": "pixel"}}
SERVER = "10.77.0.1"
PREFIX = f"fs{os.getpid() % 10_000}"


def ip(*words: str) -> None:
    """The `ip` command."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Machines(Loopback):
    """The federation of `Loopback`, with every kit in a separate namespace."""

    def __init__(self, folder) -> None:
        # Programs are not forked here, because a forked program would stay in its parent's namespace.
        super().__init__(folder, settings={"address": SERVER, "listen": "0.0.0.0", "port": 9092}, warm=False)

    def namespace(self, name: str) -> str:
        """The namespace of a kit's machine."""
        return f"{PREFIX}-{name}"

    def build(self) -> None:
        """Create namespaces, a bridge, and one cable per site."""
        bridge = self.namespace("server")
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "set", "lo", "up")
        ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", bridge, "addr", "add", f"{SERVER}/24", "dev", "br0")
        ip("-n", bridge, "link", "set", "br0", "up")
        for number, site in enumerate(self.sites, start=2):
            own, cable = self.namespace(site), f"v{number}"
            ip("netns", "add", own)
            ip("-n", own, "link", "set", "lo", "up")
            ip("link", "add", cable, "netns", bridge, "type", "veth", "peer", "name", "eth0", "netns", own)
            ip("-n", bridge, "link", "set", cable, "master", "br0", "up")
            ip("-n", own, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", own, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Remove the namespaces, and with them cables and bridge."""
        for name in ["server", *self.sites]:
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True)

    def inside(self, name: str) -> list[str]:
        """Words that run a command on a machine."""
        return ["ip", "netns", "exec", self.namespace(name)]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """The machines of a server, three source sites and one target site, which are connected."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip (iproute2)")
    federation = Machines(tmp_path_factory.mktemp("machines"))
    federation.build()
    try:
        with federation:
            yield federation
    finally:
        federation.remove()


@pytest.mark.namespaces
@pytest.mark.parametrize("method", METHODS)
def test_separate_machines_give_the_numbers_of_inline(method, machines, tmp_path):
    """This is a run of three rounds over TLS with keys; only the target site has the target's images."""
    settings = {"train.rounds": 3, **METHODS[method]}
    inline = run_inline(tmp_path / "inline", method, **settings)
    output = tmp_path / "out"
    words = {**settings, "run.runtime": "deployment", "run.federation": machines.file}
    done = subprocess.run(
        [*machines.inside("server"), *command(output, method, **words)],
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    columns = ["round", "mean_validation_accuracy", "target_accuracy"]
    deployed = run_folder(output, method)
    pd.testing.assert_frame_equal(
        numbers(deployed / "rounds.csv")[columns], numbers(inline / "rounds.csv")[columns], rtol=0, atol=1e-4
    )
    assert set(pd.read_csv(deployed / "clients.csv")["client"]) == {*SOURCES, TARGET}


@pytest.mark.namespaces
def test_sites_reach_the_server_and_nobody_else(machines):
    """The machines are separate: other machines cannot connect to a site's own ports."""
    ping = [*machines.inside("site-rot0"), "bash", "-c"]
    assert subprocess.run([*ping, f"exec 3<>/dev/tcp/{SERVER}/9092"], capture_output=True).returncode == 0
    port = machines.federation.site("site-rot15").port
    assert subprocess.run([*ping, f"exec 3<>/dev/tcp/10.77.0.3/{port}"], capture_output=True).returncode != 0
