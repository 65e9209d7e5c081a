"""Real federations on this machine: `fedsim deploy init` writes the kits, whose own scripts start them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w
from cable import Cable
from processes import kill_tree, until
from support import free_ports

from fedsim.deploy.federation import Federation, read_federation
from fedsim.deploy.kits import init

HERE = Path(__file__).parent
WARM, FAULTY = HERE / "warm.py", HERE / "faulty"
FLOWER = ("flwr", "flwr-clientapp", "flwr-serverapp", "flower-superlink", "flower-supernode", "flower-superexec")
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
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
VICTIM, SITE = "rot15", "site-rot15"  # which faults strike


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
    nginx: bool = False  # where it is installed
    federation: Federation | None = None
    cables: dict[str, Cable] = field(default_factory=dict)
    _warm_process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        names = [*self.sources, *([self.unseen] if self.target else [])]
        server, control, *ports = free_ports(2 + len(names))
        roles = ["target" if name == self.unseen else "source" for name in names]
        sites = [
            {"name": f"site-{name}", "domain": name, "role": role, "port": port}
            | ({"data_dir": self.data[name]} if self.data else {})
            for name, role, port in zip(names, roles, ports, strict=True)
        ]
        proxy = {"proxy": "nginx", "control": f"127.0.0.1:{control}"} if self.nginx and NGINX else {"proxy": "none"}
        table = {"address": "127.0.0.1", "port": server, **proxy, "retry_seconds": 3, "sites": sites}
        self.file.write_text(tomli_w.dumps({**table, **self.settings}))
        self.federation = read_federation(self.file)
        init(self.federation)

    @property
    def file(self) -> Path:
        return self.folder / "federation.toml"

    @property
    def sites(self) -> list[str]:
        return [site.name for site in self.federation.sites]

    def connect_by_cable(self, site: str) -> None:
        """Let a site reach the server by a cable that can be cut."""
        self.cables[site] = Cable(self.federation.port)
        self.rewrite(site, self.federation.public_address, f"127.0.0.1:{self.cables[site].port}")

    def rewrite(self, site: str, old: str, new: str) -> None:
        """Change a site's site.env, as its owner may."""
        env = self.federation.kit(site) / "site.env"
        env.write_text(env.read_text().replace(old, new))

    def __enter__(self) -> "Loopback":
        try:
            if self.warm:
                self._prepare_warm()
            for patience in (None, None, None, 0):  # start.sh does only what is missing; a busy machine takes its time
                if self.start("server", expect=patience).returncode == 0:
                    break
            with ThreadPoolExecutor(len(self.sites)) as pool:
                list(pool.map(lambda site: self.start(site, expect=None), self.sites))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with ThreadPoolExecutor(len(self.sites)) as pool:
            list(pool.map(self.stop, self.sites))
        self.stop("server")
        for cable in self.cables.values():
            cable.close()
        if self._warm_process is not None:
            self._warm_process.terminate()
            self._warm_process.wait(20)

    def fault_file(self, site: str = SITE) -> Path:
        """The file that faulty/sitecustomize.py reads on that site."""
        return self.folder / f"{site}.fault"

    def break_site(self, kind: str, site: str = SITE, **more: object) -> Path:
        """Let a site fail once, in round 2; the returned file is removed when the fault has happened."""
        file = self.fault_file(site)
        file.write_text(json.dumps({"kind": kind, "round": 2, "once": True, "seconds": 0, **more}))
        return file

    @contextmanager
    def posing_as(self, domain: str, site: str = "site-rot30") -> Iterator[None]:
        """A registered site whose site.env claims another's domain."""
        own = self.federation.site(site).domain
        self._claim(site, own, domain)
        try:
            yield
        finally:
            self._claim(site, domain, own)

    def _claim(self, site: str, old: str, new: str) -> None:
        self.stop(site)
        self.rewrite(site, f"DOMAIN={old}", f"DOMAIN={new}")
        self.start(site, expect=None)

    def start(self, name: str, expect: int | None = 0) -> subprocess.CompletedProcess:
        """Run a kit's start.sh."""
        own = {"FEDSIM_FAULT": str(self.fault_file(name)), "FEDSIM_FAULTY": str(FAULTY / "sitecustomize.py")}
        paths = [str(FAULTY), *filter(None, [os.environ.get("PYTHONPATH")])]
        own |= {} if self.warm else {"PYTHONPATH": os.pathsep.join(paths)}
        return self._script(name, "start.sh", self.environment | (own if name != "server" else {}), expect)

    def stop(self, name: str) -> str:
        """Run a kit's stop.sh, and return what it says."""
        return self._script(name, "stop.sh", self.environment, None).stdout

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

    def kill(self, name: str) -> None:
        """kill -9 a SuperNode, or the SuperLink with all that it started."""
        kill_tree(self.pid(name))

    def pid(self, name: str) -> int:
        """Process id of a site's SuperNode, or of the SuperLink."""
        return int(self._run_file(name, "pid").read_text())

    def log(self, name: str) -> str:
        """A kit's log."""
        return self._run_file(name, "log").read_text(errors="replace")

    def _run_file(self, name: str, kind: str) -> Path:
        return self.federation.kit(name) / "run" / f"{'superlink' if name == 'server' else 'supernode'}.{kind}"

    def begin(self, output: Path, method: str = "fedavg", **settings: object) -> subprocess.Popen:
        """Start `fedsim run` of the small experiment on this federation."""
        words = command(output, method, **{"run.runtime": "deployment", "run.federation": self.file, **settings})
        program = [str(self._programs / "fedsim")] if self.warm else FEDSIM
        return subprocess.Popen(
            [*self.inside("server"), *program, *words], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, output: Path, method: str = "fedavg", **settings: object) -> subprocess.CompletedProcess:
        """Run the small experiment to its end."""
        process = self.begin(output, method, **settings)
        said = process.communicate(timeout=1800)
        return subprocess.CompletedProcess(process.args, process.returncode, *said)

    def inside(self, name: str) -> list[str]:
        """The start of a command line that runs a command on the machine of that kit."""
        return []

    def _script(self, name: str, script: str, environment: dict, expect: int | None) -> subprocess.CompletedProcess:
        kit = self.federation.kit(name)
        with tempfile.TemporaryFile("w+") as said:  # a pipe would stay open as long as what the script starts
            done = subprocess.run(
                [*self.inside(name), kit / script], cwd=kit, env=environment, text=True, timeout=400,
                stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip
            said.seek(0)
            done.stdout = said.read()
        if expect is not None and done.returncode != expect:
            raise RuntimeError(f"{name}/{script}: {done.returncode}: {done.stdout}")
        return done


FEDSIM = [sys.executable, "-c", "from fedsim.commands.cli import main; main()"]


def command(output: Path, method: str, **settings: object) -> list[str]:
    """The words after `fedsim` that run the small experiment."""
    words = [f"{key}={value}" for key, value in {**SMALL, **settings}.items()]
    options = [part for word in words for part in ("--set", word)]
    return ["run", "digits", "--method", method, "--output", str(output), *options]


def run_folder(output: Path, method: str = "fedavg", target: str = TARGET) -> Path:
    """The folder into which the small experiment writes its records."""
    return output / "small" / method / target / "seed0"


def run_inline(output: Path, method: str = "fedavg", **settings: object) -> Path:
    """Run the same experiment in one process; returns its folder."""
    words = [*FEDSIM, *command(output, method, **settings)]
    subprocess.run(words, cwd=output.parent, env=ENVIRONMENT, check=True, capture_output=True)
    return run_folder(output, method, settings.get("run.target", TARGET))
