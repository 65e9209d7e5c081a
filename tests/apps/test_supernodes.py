"""The example apps on SuperNodes: a SuperLink and three SuperNodes on loopback, as on three machines."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import tomli_w
from apps import EXAMPLES
from processes import kill_tree, until
from support import free_ports

from fedsim.flower.processes import QUIET, ask_flwr

ROOT = Path(__file__).parents[2]
SCANNERS = ("scanner-a", "scanner-b", "scanner-c")


@contextmanager
def federation(folder: Path) -> Iterator[dict[str, str]]:
    """A SuperLink with three SuperNodes; yields the environment in which the `flwr` command reaches it."""
    ports = free_ports(4)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    home = folder / "flwr"
    home.mkdir()
    link = {"default": "here", "here": {"address": f"127.0.0.1:{ports[0]}", "insecure": True}}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": link}))
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)}
    server = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation"]
    server += ["--host", "127.0.0.1", "--port", str(ports[0])]
    nodes = []
    for number in range(3):
        node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{ports[0]}"]
        node += ["--node-config", f"partition-id={number} num-partitions=3"]
        nodes.append([*node, "--port", str(ports[1 + number])])
    started = []
    try:
        for number, command in enumerate([server, *nodes]):
            with (folder / f"process-{number}.log").open("w") as log:
                started.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log))
        until(lambda: ask_flwr(["list"], folder, environment).get("success"), 120, "SuperLink")
        yield environment
    finally:
        for process in started:
            kill_tree(process.pid)
            process.wait()


@pytest.mark.deployment
@pytest.mark.parametrize("example", ["any-client", "our-client"])
def test_an_example_runs_on_supernodes(example, tmp_path):
    app = tmp_path / "app"
    shutil.copytree(EXAMPLES / example, app, ignore=shutil.ignore_patterns("__pycache__"))
    settings = tmp_path / "settings.toml"
    settings.write_text(tomli_w.dumps({"output": str(tmp_path / "out"), "num-server-rounds": 2}))
    with federation(tmp_path) as environment:
        answer = ask_flwr(["run", str(app), "--run-config", str(settings)], tmp_path, environment)
        assert "run-id" in answer, answer

        def ended() -> str | None:
            said = ask_flwr(["list", "--run-id", str(answer["run-id"])], tmp_path, environment)
            for run in said.get("runs", ()):  # a busy SuperLink may leave one question without an answer
                if run["status"].startswith("finished"):
                    return run["status"]
            return None

        status = until(ended, 600, "end of the run")
        logs = "\n".join(file.read_text()[-3000:] for file in sorted(tmp_path.glob("process-*.log")))
        assert status == "finished:completed", logs
    (clients,) = (tmp_path / "out").rglob("clients.csv")
    rows = pd.read_csv(clients)
    assert sorted(set(rows["client"])) == list(SCANNERS)
    assert set(rows["status"]) == {"ok"}
    assert pd.read_csv(clients.with_name("rounds.csv"))["target_accuracy"].notna().all()
