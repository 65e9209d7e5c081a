"""The start page's `flwr run` command works unchanged for somebody who has never used Flower."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from support import free_ports, numbers

from fedsim.runtime.launch import launch
from fedsim.settings.experiment import read_experiment

ROOT = Path(__file__).parents[2]


def readme_line() -> list[str]:
    (line,) = re.findall(r"^flwr run .*$", (ROOT / "docs" / "start.md").read_text(), flags=re.M)
    return shlex.split(line)


def processes(word: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and "flower-super" in line:
            yield int(folder.name)


@pytest.fixture
def newcomer(tmp_path):
    """A copy of the repository, and the environment of a user with an empty home; processes that are left are ended.

    Flower installs nothing here, because it would take 5 GB, as the page says.
    """
    app = tmp_path / "app"
    for name in ("fedsim", "clients", "strategies", "configs"):
        shutil.copytree(ROOT / name, app / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, app / name)
    (port,) = free_ports(1)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "PYTHONPATH"))}
    variables = {
        **kept,
        "HOME": str(tmp_path / "home"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),  # somebody else's SuperLink may run on this machine
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    (tmp_path / "home").mkdir()
    yield app, variables
    for process in list(processes(str(port))):
        os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + 15
    while any(processes(str(port))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not list(processes(str(port)))


@pytest.mark.flower
def test_the_readmes_flwr_run_gives_the_inline_numbers(newcomer, tmp_path):
    app, variables = newcomer
    done = subprocess.run(readme_line(), cwd=app, env=variables, capture_output=True, text=True, timeout=900)
    records = app / "outputs" / "digits" / "fedavg" / "rot75" / "seed0"
    assert (records / "summary.csv").is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 simulated SuperNodes" in done.stdout + done.stderr  # Flower's default, for five clients
    words = ["method.name=fedavg", "run.target=rot75", "run.seed=0", f"run.output={tmp_path / 'inline'}"]
    inline = launch(read_experiment("digits", words))
    pd.testing.assert_frame_equal(numbers(records / "rounds.csv"), numbers(inline / "rounds.csv"), check_exact=True)
