"""A federation whose server, sites and attacker have a network namespace each, like separate machines.

Needs root and `ip` (Debian: iproute2). The namespaces are joined by a bridge in the server's; nothing leaves them.
"""

import os
import shutil
import subprocess
from pathlib import Path

from harness import Loopback

SERVER, PORT = "10.77.0.1", 9092
PREFIX = f"fs{os.getpid() % 10_000}"
AVAILABLE = os.geteuid() == 0 and shutil.which("ip") is not None


def ip(*words: str) -> None:
    """The `ip` command."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Machines(Loopback):
    """The federation of `Loopback`, with every kit in a separate namespace; each site has a cable v2, v3, ..."""

    def __init__(self, folder: Path, target: bool = True, proxy: str = "none") -> None:
        settings = {"address": SERVER, "listen": "0.0.0.0", "port": PORT, "proxy": proxy}
        # Programs are not forked here, because a forked program would stay in its parent's namespace.
        super().__init__(folder, target, settings, warm=False)

    def namespace(self, name: str) -> str:
        """The namespace of a kit's machine, or of the attacker's."""
        return f"{PREFIX}-{name}"

    def inside(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(name)]

    def link(self, site: str) -> str:
        """The name of a machine's cable in the server's namespace."""
        return f"v{2 + [*self.sites, 'attacker'].index(site)}"

    def __enter__(self) -> "Machines":
        bridge = self.namespace("server")
        ip("netns", "add", bridge)
        try:
            ip("-n", bridge, "link", "set", "lo", "up")
            ip("-n", bridge, "link", "add", "br0", "type", "bridge")
            ip("-n", bridge, "addr", "add", f"{SERVER}/24", "dev", "br0")
            ip("-n", bridge, "link", "set", "br0", "up")
            for name in (*self.sites, "attacker"):
                own, cable = self.namespace(name), self.link(name)
                ip("netns", "add", own)
                ip("-n", own, "link", "set", "lo", "up")
                ip("link", "add", cable, "netns", bridge, "type", "veth", "peer", "name", "eth0", "netns", own)
                ip("-n", bridge, "link", "set", cable, "master", "br0", "up")
                ip("-n", own, "addr", "add", f"10.77.0.{cable[1:]}/24", "dev", "eth0")
                ip("-n", own, "link", "set", "eth0", "up")
            super().__enter__()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self._remove()

    def _remove(self) -> None:
        for name in ("server", *self.sites, "attacker"):  # and with them cables and bridge
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True)
