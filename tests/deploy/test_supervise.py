"""The script that keeps a site's SuperNode running, tried with a program in the place of `fedsim deploy supernode`."""

import os
import shutil
import signal
import socket
import subprocess
import time

import pytest

PROGRAM = """#!/usr/bin/env bash
[ "$2" = supernode ] || exec sleep 600
echo start >>starts
if [ "$(wc -l <starts)" = 1 ]; then
  {first}
fi
touch run/contact
exec sleep 600
"""


@pytest.fixture
def kit(federation):
    folder = federation.kit("alpha")
    (folder / "run").mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    settings = (folder / "site.env").read_text()
    (folder / "site.env").write_text(settings + "RETRY_SECONDS=0\n")
    return folder


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def lock_is_free(kit):
    """No supervisor, and no process that one has started, holds the kit's lock."""
    return subprocess.run(["flock", "-n", kit / "run" / "lock", "true"], check=False).returncode == 0


class Supervised:
    """supervise.sh at work; `first` is what the first SuperNode does."""

    def __init__(self, kit, first, **settings):
        # The processes of an earlier supervisor hold the lock a moment longer than it lives.
        wait_for(lambda: lock_is_free(kit))
        program = kit / ".venv" / "bin" / "fedsim"
        program.write_text(PROGRAM.format(first=first))
        program.chmod(0o755)
        environment = {**os.environ, "WATCH_SECONDS": "0.1", **settings}
        command = ["flock", "-n", "-F", "run/lock", "./supervise.sh"]
        self.kit, self.said = kit, ""
        self.process = subprocess.Popen(command, cwd=kit, env=environment, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def starts(self):
        file = self.kit / "starts"
        return file.read_text().count("start") if file.exists() else 0

    def __exit__(self, *error):
        self.process.send_signal(signal.SIGTERM)
        self.said = self.process.communicate(timeout=30)[0]


@pytest.mark.parametrize("deaf", ["", "trap '' TERM; while :; do sleep 0.1; done"])
def test_a_supernode_that_stays_after_a_broken_handshake_is_started_again(kit, deaf):
    """Flower's process stays and does nothing; on SIGTERM it ends, or is killed. The next one is left alone."""
    with Supervised(kit, f'echo "SSL/TLS handshake error detected."\n  {deaf or "exec sleep 600"}') as supervised:
        wait_for(lambda: supervised.starts() == 2)
        time.sleep(1.2)
        assert supervised.starts() == 2
    assert "next attempt in 0 s" in supervised.said
    assert supervised.said.endswith("supervise: stopped\n")
    wait_for(lambda: lock_is_free(kit), 5)


def test_the_sites_own_values_reach_its_supernode(kit):
    """NODE_CONFIG of site.env is part of the node config; it is where a site sets its own privacy."""
    with (kit / "site.env").open("a") as file:
        file.write('NODE_CONFIG="dp-clip=0.5 dp-epsilon=1.0"\n')
    with Supervised(kit, 'echo "$*" >words; touch run/contact; exec sleep 600'):
        wait_for(lambda: (kit / "words").exists() and (kit / "words").read_text())
    assert "state-dir='" in (kit / "words").read_text()
    assert (kit / "words").read_text().rstrip().endswith(" dp-clip=0.5 dp-epsilon=1.0")


@pytest.fixture
def server(kit):
    """Something listens where the server should."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        settings = (kit / "site.env").read_text()
        (kit / "site.env").write_text(settings + f"SUPERLINK=127.0.0.1:{door.getsockname()[1]}\n")
        yield door


def test_a_supernode_that_lost_the_server_is_started_again(kit, server):
    """It lives and had contact, but has none any more although the server listens."""
    first = "touch -d '-100 seconds' run/contact; exec sleep 600"
    with Supervised(kit, first, SILENT_SECONDS="5") as supervised:
        wait_for(lambda: supervised.starts() == 2)
    assert "no contact with" in supervised.said


def test_a_supernode_is_left_alone_while_the_server_is_away(kit, server):
    """Flower reconnects by itself; what it computes would be lost."""
    server.close()
    first = "touch -d '-100 seconds' run/contact; exec sleep 600"
    with Supervised(kit, first, SILENT_SECONDS="5") as supervised:
        time.sleep(1.3)
        assert supervised.starts() == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("[code: 2990] the clock of this machine is 12 s ahead of the server's", "the clock of this machine is 12 s"),
        ("CERTIFICATE_VERIFY_FAILED certificate verify failed: certificate has expired", "has expired: the operator"),
        pytest.param(
            "CERTIFICATE_VERIFY_FAILED unable to get local issuer certificate",
            "does not fit ca.crt",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "[code: 2004] this key is not registered", "the server refuses this site's key", marks=pytest.mark.slow
        ),
    ],
)
def test_reasons_are_said_in_plain_words(kit, words, reason):
    """What Flower printed, in one line that says what to do."""
    with Supervised(kit, f'echo "{words}"; exit 1') as supervised:
        wait_for(lambda: supervised.starts() == 2)
    said = next(line for line in supervised.said.splitlines() if "next attempt in 0 s: " in line)
    assert reason in said


def test_a_site_does_not_give_up(kit):
    """By default it tries as long as its machine lives; with `tries` it ends after so many refused starts."""
    with Supervised(kit, "exit 1") as supervised:
        wait_for(lambda: supervised.starts() == 2)
    assert "gave up" not in supervised.said
    (kit / "starts").unlink()
    settings = (kit / "site.env").read_text()
    (kit / "site.env").write_text(settings + "TRIES=1\n")
    with Supervised(kit, "exit 1") as supervised:
        assert supervised.process.wait(20) == 1
    assert "gave up after 1 attempts" in supervised.said


def start(kit):
    """start.sh, called while the supervisor runs."""
    tools = kit / ".venv" / "bin"
    (tools / "flower-supernode").write_text("#!/bin/sh\n")
    (tools / "flower-supernode").chmod(0o755)
    return subprocess.run([kit / "start.sh"], capture_output=True, text=True, timeout=30)


def test_start_tells_running_from_connected(kit):
    """Exit code 0 with a fresh contact; 1 with an old one or none, and why."""
    with Supervised(kit, "exit 3") as supervised:
        wait_for(lambda: supervised.starts() == 2 and (kit / "run" / "contact").exists())
        done = start(kit)
        assert done.returncode == 0, done.stderr
        assert "running and connected" in done.stdout
        old = time.time() - 200
        os.utime(kit / "run" / "contact", (old, old))
        done = start(kit)
        assert done.returncode == 1
        assert "its last contact with" in done.stderr
        (kit / "run" / "contact").unlink()
        assert "has not reached" in start(kit).stderr


def test_the_systemd_unit_is_sound(kit, tmp_path):
    """systemd's own check has nothing to say; paths with blanks are quoted."""
    done = subprocess.run([kit / "start.sh", "--unit"], capture_output=True, text=True, check=True)
    assert f'ExecStart="{kit}/start.sh" --foreground' in done.stdout
    assert "Restart=always" in done.stdout
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "fedsim-alpha.service"
    unit.write_text(done.stdout)
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert "fedsim-alpha.service" not in checked.stderr, checked.stderr
