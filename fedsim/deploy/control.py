"""The operator's side of a SuperLink: `flwr` on its control path, and the registration of the sites' keys."""

import fcntl
import json
import os
import signal
import sys
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.deploy.kits import is_locked, write_connection
from fedsim.deploy.registry import members
from fedsim.flower.processes import QUIET, ask_flwr, write_app

START_SECONDS = 90.0  # a SuperLink that has just been started


class Control:
    """Calls `flwr` on the control path of a federation's SuperLink."""

    def __init__(self, federation: Federation) -> None:
        if not federation.ca_certificate.is_file():
            raise UserError(
                f"no kit of the server in {federation.kit('server')}; call `fedsim deploy init`, "
                "or give the federation.toml that lies in the server's kit"
            )
        self.federation = federation
        write_connection(federation)
        local = ",".join(["127.0.0.1", "localhost", federation.control_host, os.environ.get("NO_PROXY", "")])
        programs = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            **QUIET,
            "FLWR_HOME": str(federation.flwr_home),
            "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
            "NO_PROXY": local,
            "no_proxy": local,
        }

    def flwr(self, *words: str) -> dict[str, Any]:
        """Returns the answer of `flwr ... --format json`; {"success": False, "error-message": ...} when it fails."""
        return ask_flwr(words, self.federation.flwr_home, self.environment)

    def submit(self, folder: Path, app: Mapping, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer of `flwr run` for an app with this run config, which are written into a folder."""
        settings = folder / "settings.toml"
        settings.write_text(tomli_w.dumps(config))
        written = write_app(folder / "app", app)
        return self.flwr("run", str(written), CONNECTION, "--run-config", str(settings))

    def online(self, wait: float = 0.0) -> dict[int, bool]:
        """Returns the node ids known to the SuperLink, and whether each is online.

        Raises UserError when it does not answer within `wait` seconds (it is asked at least once).
        """
        deadline = time.monotonic() + wait
        while True:
            answer = self.flwr("supernode", "list", CONNECTION)
            if "nodes" in answer:
                return nodes_online(answer["nodes"])
            if time.monotonic() > deadline:
                raise UserError(
                    f"the SuperLink at {self.federation.control_address} does not answer "
                    f"({_last_line(answer)}); start it with {self.federation.kit('server') / 'start.sh'}"
                )
            time.sleep(0.5)


def nodes_online(nodes: Iterable[Mapping[str, Any]]) -> dict[int, bool]:
    """Returns the ids of the SuperLink's nodes that are registered, and whether each is online."""
    online: dict[int, bool] = {}
    for node in nodes:
        if node["status"] not in ("unregistered", "deleted"):
            online[int(node["node-id"])] = node["status"] == "online"
    return online


def register(federation: Federation, wait: float = START_SECONDS) -> dict[str, int]:
    """Makes the SuperLink's list of keys equal to the server kit's `sites/*.pub`; returns node ids by site.

    Known keys are not touched; changed and removed ones are unregistered. Node ids are kept in `state/nodes/`. A second
    call waits for the first.
    """
    control = Control(federation)
    records = federation.kit("server") / "state" / "nodes"
    records.mkdir(parents=True, exist_ok=True)
    with (records / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _register_all(control, records, wait)
        write_key_map(federation)
    return registered_nodes(federation)


def _register_all(control: Control, records: Path, wait: float) -> None:
    """Unregisters the keys that have changed or gone, and registers those that are new."""
    public_keys = control.federation.kit("server") / "sites"
    registered = control.online(wait)
    keys = {file.stem: file.read_text() for file in sorted(public_keys.glob("*.pub"))}
    for file in sorted(records.glob("*.json")):
        record = json.loads(file.read_text())
        if record["node"] not in registered:
            file.unlink()
        elif keys.get(file.stem) != record["key"]:
            answer = control.flwr("supernode", "unregister", str(record["node"]), CONNECTION)
            _checked(answer, file.stem)
            file.unlink()
    for site, key in keys.items():
        if not (records / f"{site}.json").is_file():
            _register_one(control, records, site, key)


def _register_one(control: Control, records: Path, site: str, key: str) -> None:
    """Registers a site's key and notes its node id; one that was interrupted before the note is found again."""
    public = control.federation.kit("server") / "sites" / f"{site}.pub"
    begun = records / f"{site}.begun"
    was_interrupted = begun.is_file() and begun.read_text() == key
    atomic_write(begun, key, durable=True)
    answer = control.flwr("supernode", "register", str(public), CONNECTION, "--name", site)
    if not answer.get("success") and was_interrupted:
        noted = {json.loads(file.read_text())["node"] for file in records.glob("*.json")}
        unnoted = [node for node in control.online() if node not in noted]
        if len(unnoted) == 1:  # with several it is not certain which one has this key
            answer = {"success": True, "node-id": unnoted[0]}
    node = int(_checked(answer, site)["node-id"])
    record = json.dumps({"node": node, "key": key})
    atomic_write(records / f"{site}.json", record, durable=True)
    begun.unlink()


def add_public_key(federation: Federation, site: str, key: Path | None) -> None:
    """Copies a public key that a site has made itself into the server's kit.

    Raises UserError when the file holds no such key, when it is another site's, or when the site already has another
    one.
    """
    key = key or Path("key.pub")
    public_keys = federation.kit("server") / "sites"
    file = public_keys / f"{federation.site(site).name}.pub"
    try:
        text = key.read_text()
        public = load_ssh_public_key(text.encode())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{key} holds no public key: {error}") from None
    if not isinstance(public, EllipticCurvePublicKey):
        raise UserError(f"{key}: a key on a NIST curve is needed, as a site's start.sh makes it")
    key_of_site = text.split()[:2]  # without its comment
    for other in sorted(public_keys.glob("*.pub")):  # the SuperLink takes a key once, and would then refuse them all
        if other != file and other.read_text().split()[:2] == key_of_site:
            raise UserError(
                f"{key} holds the key of site {other.stem!r}; site {site!r} needs one of its own, which its own kit's "
                "start.sh makes"
            )
    if file.is_file() and file.read_text() != text:
        raise UserError(f"site {site!r} has another key already; remove {file} first if this one replaces it")
    file.write_text(text)


def write_key_map(federation: Federation) -> None:
    """Writes the registered keys in the form that nginx reads (`map` from the header to the site), and tells nginx."""
    kit = federation.kit("server")
    lines = []
    for member in members(federation):
        key = b64encode(member.key).decode()
        lines.append(f'"{key}" {member.site};\n')
    atomic_write(kit / "state" / "keys.map", "".join(lines), durable=True)
    reload_proxy(federation)


def reload_proxy(federation: Federation) -> None:
    """Makes this kit's running nginx read its configuration, keys and certificates again; connections stay open."""
    run = federation.kit("server") / "run"
    lock, process = run / "nginx.lock", run / "nginx-master.pid"
    if lock.is_file() and is_locked(lock) and process.is_file():
        os.kill(int(process.read_text()), signal.SIGHUP)


def registered_nodes(federation: Federation) -> dict[str, int]:
    """Returns the node ids by site, as `register` has noted them."""
    records = federation.kit("server") / "state" / "nodes"
    nodes: dict[str, int] = {}
    for file in sorted(records.glob("*.json")):
        record = json.loads(file.read_text())
        nodes[file.stem] = int(record["node"])
    return nodes


def _checked(answer: dict[str, Any], site: str) -> dict[str, Any]:
    """Returns an answer of `flwr` about a site; raises UserError with its reason when it is none of success."""
    if answer.get("success"):
        return answer
    reason = _last_line(answer)
    if "[code: 23]" in reason:  # Flower never takes an unregistered key again
        reason = (
            "its key was registered before and then removed; to come back it needs a new one: "
            "remove its kit and call `fedsim deploy init --add`"
        )
    raise UserError(f"site {site!r}: {reason}")


def _last_line(answer: dict[str, Any]) -> str:
    """Returns the last line of what `flwr` says of a failure."""
    message = str(answer.get("error-message", answer)).strip()
    return message.splitlines()[-1].strip() if message else "no reason given"
