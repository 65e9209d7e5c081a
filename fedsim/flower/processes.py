"""Flower's programs as processes: a SuperLink that lives as long as a run, and the `flwr` command.

`flwr run` alone reports success as soon as a run is submitted, and its SuperLink continues in the background. Here the
SuperLink has a free loopback port, a temporary FLWR_HOME and a working folder without other files. It installs nothing
and sends no telemetry.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w

from fedsim.common.about import extra
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.common.values import JsonTable

START_SECONDS = 180.0
STOP_SECONDS = 15.0
CALL_SECONDS = 60.0  # time limit of one flwr command
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
    "FORCE_COLOR": "",  # its JSON answers would be coloured
}
APP: JsonTable = {  # an app without files of its own: its components come from the installed package
    "project": {"name": "fedsim-run", "version": "0.1.0", "description": "A run of fedsim", "license": "Apache-2.0"},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedsim",
                "components": {"serverapp": "fedsim.apps.server:app", "clientapp": "fedsim.apps.client:app"},
                "config": {"experiment": ""},
            }
        }
    },
}


def write_app(folder: Path, app: Mapping = APP) -> Path:
    """Write a folder with a Flower app that consists of fedsim's server app and client app; returns the folder."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(tomli_w.dumps(app))
    return folder


class SuperLink:
    """A Flower SuperLink that lives as long as the `with` block."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.environment = {**os.environ, **QUIET, **variables, "FLWR_HOME": str(folder / "flwr"), "PATH": search}
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "SuperLink":
        home = self.folder / "flwr"
        home.mkdir()
        connection = {"default": "here", "here": {"address": f"127.0.0.1:{self.port}", "insecure": True}}
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": connection}))
        command = [
            self._tool("flower-superlink"),
            "--insecure",
            "--simulation",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
        ]
        with (self.folder / "superlink.log").open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def submit(self, app: Path, settings: Path, federation: str) -> str:
        """Submit a run; returns its id."""
        answer = self._flwr("run", str(app), "--run-config", str(settings), "--federation-config", federation)
        if "run-id" not in answer:
            reason = answer.get("error-message", answer)
            raise ClientFailedError(f"Flower refused the run: {reason}\n{self._last_lines()}")
        return str(answer["run-id"])

    def log(self, run_id: str) -> Iterator[str]:
        """Lines of the run's log, until it ends."""
        command = [self._tool("flwr"), "log", run_id, "--stream"]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None  # a pipe
        try:
            yield from process.stdout
        finally:
            process.terminate()
            process.wait()

    def verdict(self, run_id: str) -> tuple[str, str]:
        """(status, details) of a run whose log has ended; waits until the run has ended too."""
        for _ in range(20):
            runs = self._flwr("list", "--run-id", run_id).get("runs", [])
            row = runs[0] if runs else {}
            status = str(row.get("status", "unknown"))
            if status.startswith("finished") or not runs:
                break
            time.sleep(0.5)
        return status, str(row.get("status-details", ""))

    def stop(self) -> None:
        """End the SuperLink and all processes that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                local = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with local.open(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return
            if self._process is None or self._process.poll() is not None:
                break
            time.sleep(0.1)
        raise ClientFailedError(f"Flower's SuperLink did not start:\n{self._last_lines()}")

    def _flwr(self, *words: str) -> dict:
        self._tool("flwr")
        answer = ask_flwr(words, self.folder, self.environment)
        if not answer.get("success", True) and words[0] != "run":
            raise ClientFailedError(f"flwr {words[0]} failed: {answer.get('error-message', answer)}")
        return answer

    def _tool(self, name: str) -> str:
        path = shutil.which(name, path=self.environment["PATH"])
        if path is None or shutil.which("flwr-simulation", path=self.environment["PATH"]) is None:
            raise UserError(f"run.runtime 'flower' needs Flower's simulation engine: {extra('ray')}")
        return path

    def _last_lines(self) -> str:
        file = self.folder / "superlink.log"
        return "\n".join(file.read_text(errors="replace").splitlines()[-15:]) if file.is_file() else ""


def ask_flwr(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The answer of `flwr WORDS --format json`; {"success": False, "error-message": ...} when there is none."""
    tool = shutil.which("flwr", path=environment["PATH"]) or "flwr"
    try:
        done = subprocess.run(
            [tool, *words, "--format", "json"],
            cwd=folder,
            env=dict(environment),
            text=True,
            capture_output=True,
            timeout=CALL_SECONDS,
            start_new_session=True,  # so that Ctrl-C does not reach the flwr command
        )
    except subprocess.TimeoutExpired:
        return {"success": False, "error-message": f"no answer within {CALL_SECONDS:g} s"}
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"success": False, "error-message": (done.stderr or done.stdout).strip()}


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
