"""A real federation on this machine: `fedsim deploy init` writes the kits, whose own scripts start them."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w
from support import free_ports

from fedsim.deploy.federation import Federation, read_federation
from fedsim.deploy.kits import init

HERE = Path(__file__).parent
WARM = HERE / "warm.py"
FLOWER = ("flwr", "flwr-clientapp", "flwr-serverapp", "flower-superlink", "flower-supernode", "flower-superexec")
FAULTY = HERE / "faulty"
FEDSIM = [sys.executable, "-c", "from fedsim.commands.cli import main; main()"]
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
    "OMP_NUM_THREADS": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
SMALL = {  # those of `support.small_experiment` with smaller batches, as overrides of the shipped digits experiment
    "name": "small",
    "data.domains": '["rot0", "rot15", "rot30", "rot45"]',
    "data.fraction": 0.1,
    "data.split": "stratified",
    "data.holdout": 0.2,
    "train.rounds": 2,
    "train.batch_size": 16,
    "train.momentum": 0.5,
    "run.target": "rot45",
    "run.device": "cpu",
    "run.threads": 1,
    "run.wait_for_sites": 900,
    "run.timeout": 900,
}
SOURCES, TARGET = ("rot0", "rot15", "rot30"), "rot45"


def until(condition, seconds: float, what: str):
    """Wait for a condition and return its first true value; a TimeoutError says what was waited for."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        time.sleep(0.2)
    return value


def is_alive(pid: int) -> bool:
    """Whether a process is alive and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Loopback:
    """A federation of three source sites and (unless `target=False`) one target site on loopback, TLS and keys."""

    folder: Path
    target: bool = True
    settings: dict = field(default_factory=dict)
    sources: tuple[str, ...] = SOURCES
    unseen: str = TARGET
    data: dict = field(default_factory=dict)  # folders of images, by domain
    warm: bool = True  # Flower's programs are forked (warm.py): for tests of something else than their start
    federation: Federation | None = None
    _warm_process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        names = [*self.sources, *([self.unseen] if self.target else [])]
        server, *ports = free_ports(1 + len(names))
        roles = {name: "target" if name == self.unseen else "source" for name in names}
        sites = [
            {"name": f"site-{name}", "domain": name, "role": roles[name], "port": port}
            | ({"data_dir": self.data[name]} if self.data else {})
            for name, port in zip(names, ports, strict=True)
        ]
        table = {"address": "127.0.0.1", "port": server, "proxy": "none", "retry_seconds": 3, "sites": sites}
        self.file.write_text(tomli_w.dumps({**table, **self.settings}))
        self.federation = read_federation(self.file)
        init(self.federation)

    @property
    def file(self) -> Path:
        """The federation file."""
        return self.folder / "federation.toml"

    @property
    def sites(self) -> list[str]:
        """Names of the sites."""
        return [site.name for site in self.federation.sites]

    def __enter__(self) -> "Loopback":
        try:
            if self.warm:
                self._prepare_warm()
            for patience in (None, None, None, 0):  # start.sh does only what is missing; a busy machine takes its time
                if self.start("server", expect=patience).returncode == 0:
                    break
            with ThreadPoolExecutor(len(self.sites)) as pool:
                list(pool.map(lambda site: self.start(site, expect=None), self.sites))  # a busy machine takes its time
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with ThreadPoolExecutor(len(self.sites)) as pool:
            list(pool.map(self.stop, self.sites))
        self.stop("server")
        if self._warm_process is not None:
            self._warm_process.terminate()
            self._warm_process.wait(20)

    def fault_file(self, site: str) -> Path:
        """The file that faulty/sitecustomize.py reads on that site."""
        return self.folder / f"{site}.fault"

    def start(self, name: str, expect: int | None = 0) -> subprocess.CompletedProcess:
        """Run a kit's start.sh."""
        own = {"FEDSIM_FAULT": str(self.fault_file(name)), "FEDSIM_FAULTY": str(FAULTY / "sitecustomize.py")}
        paths = [str(FAULTY), *filter(None, [os.environ.get("PYTHONPATH")])]
        own |= {} if self.warm else {"PYTHONPATH": os.pathsep.join(paths)}
        return self._script(name, "start.sh", {**self.environment, **(own if name != "server" else {})}, expect)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of all processes that are started."""
        if not self.warm:
            return ENVIRONMENT
        path = f"{self._programs}{os.pathsep}{ENVIRONMENT['PATH']}"
        return {**ENVIRONMENT, "PATH": path, "WARM_SOCKET": str(self._programs / "socket")}

    @property
    def _programs(self) -> Path:
        return self.folder / "programs"

    def _prepare_warm(self) -> None:
        self._programs.mkdir(exist_ok=True)
        for name in ("fedsim", *FLOWER):
            script = self._programs / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {WARM} call {name} "$@"\n')
            script.chmod(0o755)
        (self._programs / "python").symlink_to(sys.executable)
        socket_ = self._programs / "socket"
        self._warm_process = subprocess.Popen([sys.executable, WARM, "serve", socket_], env=ENVIRONMENT)
        until(socket_.exists, 900, "warm programs")

    def stop(self, name: str) -> None:
        """Run a kit's stop.sh."""
        self._script(name, "stop.sh", self.environment, None)

    def pid(self, name: str) -> int:
        """Process id of a site's SuperNode, or of the SuperLink."""
        run = self.federation.kit(name) / "run"
        return int((run / ("superlink.pid" if name == "server" else "supernode.pid")).read_text())

    def kill(self, name: str) -> None:
        """kill -9 a SuperNode, or the SuperLink with all that it started."""
        pid = self.pid(name)
        for child in [*descendants(pid), pid]:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        until(lambda: not is_alive(pid), 10, f"end of {name}")

    def log(self, name: str) -> str:
        """A kit's log."""
        run = self.federation.kit(name) / "run"
        return (run / ("superlink.log" if name == "server" else "supernode.log")).read_text(errors="replace")

    def command(self, output: Path, method: str = "fedavg", **settings: object) -> list[str]:
        """`fedsim run` of the small experiment on this federation."""
        words = command(output, method, **{"run.runtime": "deployment", "run.federation": self.file, **settings})
        return [str(self._programs / "fedsim"), *words[len(FEDSIM) :]] if self.warm else words

    def run(self, output: Path, method: str = "fedavg", **settings: object) -> subprocess.CompletedProcess:
        """Run the small experiment to its end."""
        return subprocess.run(
            self.command(output, method, **settings),
            cwd=self.folder,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=1800,
        )

    def inside(self, name: str) -> list[str]:
        """The start of a command line that runs a command on the machine of that kit."""
        return []

    def _script(self, name: str, script: str, environment: dict, expect: int | None) -> subprocess.CompletedProcess:
        kit = self.federation.kit(name)
        with tempfile.TemporaryFile("w+") as said:  # a pipe would stay open as long as what the script starts
            done = subprocess.run(
                [*self.inside(name), kit / script],
                cwd=kit,
                env=environment,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=400,
            )
            said.seek(0)
            done.stdout = said.read()
        if expect is not None and done.returncode != expect:
            raise RuntimeError(f"{name}/{script}: {done.returncode}: {done.stdout}")
        return done


def command(output: Path, method: str, **settings: object) -> list[str]:
    """`fedsim run` of the small experiment."""
    words = [f"{key}={value}" for key, value in {**SMALL, **settings}.items()]
    options = [part for word in words for part in ("--set", word)]
    return [*FEDSIM, "run", "digits", "--method", method, "--output", str(output), *options]


def run_folder(output: Path, method: str = "fedavg", target: str = TARGET) -> Path:
    """The folder into which the small experiment writes its records."""
    return output / "small" / method / target / "seed0"


def run_inline(output: Path, method: str = "fedavg", **settings: object) -> Path:
    """Run the same experiment in one process; returns its folder."""
    subprocess.run(
        command(output, method, **settings), cwd=output.parent, env=ENVIRONMENT, check=True, capture_output=True
    )
    return run_folder(output, method, settings.get("run.target", TARGET))


def descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(word) for word in task.read_text().split()]
        except OSError:
            continue
    return [each for child in children for each in (child, *descendants(child))]
