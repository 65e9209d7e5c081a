"""The script that keeps a site's SuperNode running, tried with a program in its place."""

import os
import signal
import subprocess
import time

import pytest

SUPERNODE = """#!/usr/bin/env bash
echo start >>starts
if [ "$(wc -l <starts)" = 1 ]; then
  echo "SSL/TLS handshake error detected."
  {deaf}
fi
exec sleep 600
"""


@pytest.fixture
def kit(federation):
    folder = federation.kit("alpha")
    (folder / "run").mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    settings = (folder / "site.env").read_text()
    (folder / "site.env").write_text(settings + "RETRY_SECONDS=1\n")
    return folder


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@pytest.mark.parametrize("deaf", ["", "trap '' TERM; while :; do sleep 0.1; done"])
def test_a_supernode_that_stays_after_a_broken_handshake_is_started_again(kit, deaf):
    """Flower's process stays and does nothing; on SIGTERM it ends, or is killed. The next one is left alone."""
    program = kit / ".venv" / "bin" / "flower-supernode"
    program.write_text(SUPERNODE.format(deaf=deaf))
    program.chmod(0o755)
    environment = {**os.environ, "WATCH_SECONDS": "0.3"}
    command = ["flock", "-n", "-F", "run/lock", "./supervise.sh"]
    supervisor = subprocess.Popen(command, cwd=kit, env=environment, stdout=subprocess.PIPE, text=True)
    starts = kit / "starts"
    try:
        wait_for(lambda: starts.exists() and starts.read_text().count("start") == 2)
        time.sleep(1.5)
        assert starts.read_text().count("start") == 2
    finally:
        supervisor.send_signal(signal.SIGTERM)
        said = supervisor.communicate(timeout=30)[0]
    assert "next attempt in 1 s" in said
    assert said.endswith("supervise: stopped\n")
    wait_for(lambda: subprocess.run(["flock", "-n", kit / "run" / "lock", "true"], check=False).returncode == 0, 5)
