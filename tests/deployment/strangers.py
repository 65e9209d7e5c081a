"""SuperNodes without the correct key or certificate, and sites that ask for more than they may, must be refused."""

import re
import subprocess
import tempfile
from pathlib import Path

from harness import SITE
from lane import Lane
from outcomes import STOP, finished, last_line, need
from support import free_ports

from fedsim.deploy.certificates import write_site_key


def flower(lane: Lane, *words: object, folder: str) -> tuple[int, str]:
    """(exit code, output without colours) of a program of Flower; TimeoutExpired after four minutes."""
    environment = {**lane.environment, "FLWR_HOME": folder}
    done = subprocess.run([*map(str, words)], env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, re.sub(r"\x1b\[\d+m", "", done.stdout + done.stderr)


def stranger(lane: Lane, kind: str) -> str:
    """A SuperNode without the correct key or certificate, which must not be admitted."""
    kit, word = lane.federation.kit(SITE), "--auth-supernode-private-key"
    with tempfile.TemporaryDirectory() as folder:
        write_site_key("stranger", Path(folder) / "key", Path(folder) / "key.pub")
        own = {
            "unregistered key": ["--root-certificates", kit / "ca.crt", word, Path(folder) / "key"],
            "no key": ["--root-certificates", kit / "ca.crt"],
            "no CA": [word, kit / "key"],
            "plaintext": ["--insecure", "--max-retries", "1"],
        }[kind]
        place = ["--superlink", lane.federation.public_address, "--port", *free_ports(1)]
        try:
            code, said = flower(lane, "flower-supernode", *place, *own, folder=folder)
        except subprocess.TimeoutExpired:
            need(kind == "plaintext", "it is still trying")
            return "still trying, never connected"
    need(code != 0 and "SuperNode ID" not in said, said[-400:])
    lines = [line.strip() for line in said.splitlines() if "code" in line.lower() or "VERIFY" in line]
    return f"refused, exit {code}: {' '.join(lines)[:90]}"


def control_path(lane: Lane) -> str:
    """A site that calls the control path at the server's public address, with all that its kit holds."""
    need(lane.federation.proxy == "nginx", "there is no nginx on this machine")
    with tempfile.TemporaryDirectory() as folder:
        certificate = f'root-certificates = "{lane.federation.kit(SITE) / "ca.crt"}"\n'
        address = f'address = "{lane.federation.public_address}"\n'
        (Path(folder) / "config.toml").write_text(f"[superlink.site]\n{address}{certificate}")
        _, said = flower(lane, "flwr", "list", "site", "--format", "json", folder=folder)
    need('"runs"' not in said and "403" in said, said)
    return f"refused: {' '.join(line for line in said.splitlines() if '403' in line)[:90]}"


def impostor(lane: Lane) -> str:
    """A registered site whose owner writes another's domain into its site.env."""
    with lane.posing_as("rot0"):
        said = finished(lane.begin(lane.fresh(), **STOP, **{"run.wait_for_sites": 40}), 1)
    need("site-rot30, which claims to be 'rot0'" in said, said)
    return f"exit 1: {last_line(said)[:90]}"
