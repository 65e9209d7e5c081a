"""A site's scripts: supervise.sh keeps a SuperNode running (here a program in its place); start.sh; systemd's unit."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time

import pytest
from processes import until

PROGRAM = """#!/usr/bin/env bash
[ "$2" = supernode ] || exec sleep 600
echo start >>starts
echo "$*" >words
case "$(wc -l <starts)" in
{starts}
esac
touch run/contact
exec sleep 600
"""
ODD_NAMES = ["it's", "dollar $HOME", "back`id`", 'quote"d', "back\\slash", "two\nlines"]


@pytest.fixture
def kit(federation):
    folder = federation.kit("alpha")
    (folder / "run").mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    add(folder, "RETRY_SECONDS=0")
    return folder


def add(kit, line):
    with (kit / "site.env").open("a") as file:
        file.write(f"{line}\n")


class Supervised:
    """supervise.sh at work. Each text says what one start of the SuperNode does, and all later ones are sound."""

    def __init__(self, kit, *starts, **settings):
        program = kit / ".venv" / "bin" / "fedsim"
        program.write_text(PROGRAM.format(starts="\n".join(f"{n}) {text} ;;" for n, text in enumerate(starts, 1))))
        program.chmod(0o755)
        environment = {**os.environ, "WATCH_SECONDS": "0.1", **settings}
        command = ["flock", "-n", "-F", "run/lock", "./supervise.sh"]
        self.file, self.said = kit / "starts", ""
        self.process = subprocess.Popen(command, cwd=kit, env=environment, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def starts(self):
        return self.file.read_text().count("start") if self.file.exists() else 0

    def __exit__(self, *error):
        self.process.send_signal(signal.SIGTERM)
        self.said = self.process.communicate(timeout=30)[0]


def test_what_hangs_is_started_again_and_what_is_sound_or_without_a_server_is_left_alone(kit):
    """Flower's process stays after a broken handshake; on SIGTERM it ends, or is killed. One whose server is away
    reconnects by itself, and what it computes would be lost."""
    broken = 'echo "SSL/TLS handshake error detected."'
    deaf = f"{broken}; trap '' TERM; while :; do sleep 0.1; done"
    silent = "touch -d '-100 seconds' run/contact; exec sleep 600"
    add(kit, 'NODE_CONFIG="dp-clip=0.5 dp-epsilon=1.0"')
    with socket.create_server(("127.0.0.1", 0)) as server:
        add(kit, f"SUPERLINK=127.0.0.1:{server.getsockname()[1]}")
        with Supervised(kit, f"{broken}; exec sleep 600", deaf, silent, SILENT_SECONDS="5") as supervised:
            until(lambda: supervised.starts() == 4 and (kit / "run" / "contact").exists(), 30)
            time.sleep(0.4)
            server.close()
            os.utime(kit / "run" / "contact", (time.time() - 100,) * 2)
            time.sleep(0.4)
            assert supervised.starts() == 4
    assert supervised.said.count("next attempt in 0 s") == 3
    assert supervised.said.count("no contact with") == 1
    assert supervised.said.endswith("supervise: stopped\n")
    lock = ["flock", "-n", kit / "run" / "lock", "true"]  # no process that it has started holds it
    until(lambda: subprocess.run(lock, check=False).returncode == 0, 5)
    words = (kit / "words").read_text()
    assert "state-dir='" in words
    assert words.rstrip().endswith(" dp-clip=0.5 dp-epsilon=1.0")  # a site sets its own privacy


REASONS = {
    "[code: 2990] the clock of this machine is 12 s ahead of the server's": "the clock of this machine is 12 s",
    "CERTIFICATE_VERIFY_FAILED certificate verify failed: certificate has expired": "has expired: the operator",
    "[code: 2004] this key is not registered": "the server refuses this site's key",
}


def test_a_site_does_not_give_up_and_says_in_plain_words_what_flower_printed(kit):
    with Supervised(kit, *(f'echo "{words}"; exit 1' for words in REASONS), "kill -9 $$") as supervised:
        until(lambda: supervised.starts() == len(REASONS) + 2, 30)
    said = [line for line in supervised.said.splitlines() if "next attempt in 0 s: " in line]
    for line, reason in zip(said, [*REASONS.values(), "the SuperNode was killed (signal 9)"], strict=True):
        assert reason in line
    assert "gave up" not in supervised.said


@pytest.mark.parametrize(
    ("age", "code", "said"),
    [
        (5, 0, "running and connected"),
        (200, 1, "its last contact with"),
        (-3600, 1, "in the future: this machine's clock was set back"),
    ],
)
def test_start_tells_running_from_connected(kit, age, code, said):
    for tool in ("fedsim", "flower-supernode"):
        (kit / ".venv" / "bin" / tool).symlink_to("/bin/true")
    (kit / "run" / "contact").touch()
    os.utime(kit / "run" / "contact", (time.time() - age,) * 2)
    done = subprocess.run(["flock", "run/lock", "./start.sh"], cwd=kit, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("place", "name"), [*(("kit", name) for name in ODD_NAMES), ("DATA_DIR", "a`"), ("STATE_DIR", "a'")]
)
def test_a_folder_that_flower_cannot_take_is_refused_by_start(kit, place, name):
    """Otherwise the node config ends there, and what follows (the site's privacy) is left out."""
    kit = kit.rename(kit.with_name(name)) if place == "kit" else kit
    if place != "kit":
        add(kit, f"{place}={shlex.quote('/data/' + name)}")
    done = subprocess.run([kit / "start.sh", "--unit"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "which Flower cannot take" in done.stderr


def test_the_systemd_unit_is_sound_and_start_takes_blanks_and_other_letters(kit, tmp_path):
    add(kit, "DATA_DIR='/data/of [beta] 50% ümlaut'")
    kit = kit.rename(kit.with_name("of alpha"))
    done = subprocess.run([kit / "start.sh", "--unit"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert f'ExecStart="{kit}/start.sh" --foreground' in done.stdout
    assert "Restart=always" in done.stdout
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "fedsim-alpha.service"
    unit.write_text(done.stdout)
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert "fedsim-alpha.service" not in checked.stderr, checked.stderr
