"""SuperNodes without the correct key or certificate, and sites that ask for more than they may, must be refused."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from lanes import SITE, STOP, Lane, Outcome, need
from support import free_ports

from fedsim.deploy.certificates import write_site_key


def stranger(kind: str) -> Callable[[Lane], Outcome]:
    """A SuperNode that must not be admitted."""

    def fault(lane: Lane) -> Outcome:
        federation, kit = lane.federation.federation, lane.federation.federation.kit(SITE)
        words = ["flower-supernode", "--superlink", federation.public_address, "--port", str(free_ports(1)[0])]
        trusted = ["--root-certificates", str(kit / "ca.crt")]
        with tempfile.TemporaryDirectory() as folder:
            write_site_key("stranger", Path(folder) / "key", Path(folder) / "key.pub")
            key = ["--auth-supernode-private-key", str(Path(folder) / "key")]
            own = ["--auth-supernode-private-key", str(kit / "key")]
            more = {
                "unregistered key": [*trusted, *key],
                "no key": trusted,
                "no CA": own,
                "plaintext": ["--insecure", "--max-retries", "1"],
            }
            environment = {**lane.federation.environment, "FLWR_HOME": folder}
            try:
                done = subprocess.run(
                    [*words, *more[kind]], env=environment, capture_output=True, text=True, timeout=240
                )
            except subprocess.TimeoutExpired:
                return Outcome("still trying, never connected", kind == "plaintext")
        said = done.stdout + done.stderr
        need(done.returncode != 0 and "SuperNode ID" not in said, said[-400:])
        said = re.sub(r"\x1b\[\d+m", "", said)  # Flower's colours
        lines = [line.strip() for line in said.splitlines() if "code" in line.lower() or "VERIFY" in line]
        return Outcome(f"refused, exit {done.returncode}: {' '.join(lines)[:90]}", True)

    return fault


def control_path(lane: Lane) -> Outcome:
    """A site that calls the control path at the server's public address, with all that its kit holds."""
    federation, kit = lane.federation.federation, lane.federation.federation.kit(SITE)
    need(federation.proxy == "nginx", "there is no nginx on this machine")
    with tempfile.TemporaryDirectory() as folder:
        connection = f'address = "{federation.public_address}"\nroot-certificates = "{kit / "ca.crt"}"\n'
        (Path(folder) / "config.toml").write_text(f"[superlink.site]\n{connection}")
        environment = {**lane.federation.environment, "FLWR_HOME": folder}
        words = ["flwr", "list", "site", "--format", "json"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    need('"runs"' not in done.stdout, done.stdout)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "403" in line or "error" in line.lower()]
    return Outcome(f"refused: {' '.join(lines)[:90]}", "403" in done.stdout + done.stderr)


def impostor(lane: Lane) -> Outcome:
    """A registered site whose owner writes another's domain into its site.env."""
    env = lane.federation.federation.kit("site-rot30") / "site.env"
    honest = env.read_text()
    lane.federation.stop("site-rot30")
    env.write_text(honest.replace("DOMAIN=rot30", "DOMAIN=rot0"))
    lane.federation.start("site-rot30", expect=None)
    try:
        done = lane.run(lane.fresh(), **STOP, **{"run.wait_for_sites": 40})
    finally:
        lane.federation.stop("site-rot30")
        env.write_text(honest)
        lane.federation.start("site-rot30", expect=None)
    need(done.returncode == 1 and "site-rot30, which claims to be 'rot0'" in done.stderr, done.stderr)
    return Outcome(f"exit 1: {done.stderr.strip().splitlines()[-1][:90]}", True)
