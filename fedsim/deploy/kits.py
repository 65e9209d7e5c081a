"""`fedsim deploy init`: one kit per machine, written whole or not at all.

    <kits>/operator/    ca.key, apps.key                                      stays with the operator
    <kits>/server/      CA and server certificate, scripts, nginx.conf, sites/*.pub, connection of the operator's flwr
    <kits>/<site>/      ca.crt, the site's own key, site.env, the app bundles that it runs, scripts, peers

Everything is written into a new folder next to the kits first. Existing kits are then left alone, completed or
replaced.
"""

import fcntl
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from fedsim.common.errors import UserError
from fedsim.deploy.bundles import own_bundles
from fedsim.deploy.certificates import write_ca, write_operator_key, write_server_certificate, write_site_key
from fedsim.deploy.federation import CONNECTION, Federation, Site, host_and_port, read_federation

TEMPLATES = Path(__file__).parent / "kit"


def init(federation: Federation, force: bool = False, add: bool = False) -> list[Path]:
    """Writes the kits that are missing, or all of them anew with `force`; returns the written folders.

    Raises UserError, with nothing written, when kits exist and neither `force` nor `add` says what to do with them.
    """
    if force and add:
        raise UserError("--force renews all kits, --add writes the missing ones only: choose one")
    names = [site.name for site in federation.sites]
    existing = [name for name in ("operator", "server", *names) if federation.kit(name).exists()]
    missing = [name for name in names if name not in existing]
    if existing and not force and not add:
        lacking = ", ".join(missing) or "nothing"
        raise UserError(
            f"{federation.kits} has kits already ({', '.join(existing)}); "
            f"--add writes what is missing ({lacking}), --force renews all keys"
        )
    written = ["operator", "server", *names]
    if not existing:
        _write_all(federation)
    elif force:
        _replace_all(federation)
    else:
        _add(federation, missing)
        written = missing
    return [federation.kit(name) for name in written]


def _write_all(federation: Federation) -> None:
    with _new_folder(federation) as folder:
        _build(federation, folder)
        try:
            folder.rename(federation.kits)  # over an empty folder, if there is one
        except OSError:
            raise UserError(f"{federation.kits} holds something else than kits; set another `kits` folder") from None


def _replace_all(federation: Federation) -> None:
    replaced = federation.kits.with_name(f"{federation.kits.name}.replaced")
    if replaced.exists():
        raise UserError(f"{replaced} is left from an interrupted --force: move what you need out of it and remove it")
    kits = sorted(federation.kits.iterdir())
    running = [kit.name for kit in kits if is_running(kit)]
    if running:
        raise UserError(f"{', '.join(running)} runs from {federation.kits}: call its stop.sh before --force")
    with _new_folder(federation) as folder:
        _build(federation, folder)
        federation.kits.rename(replaced)
        folder.rename(federation.kits)
    for old in replaced.iterdir():
        _move_missing(old, federation.kits / old.name)
    shutil.rmtree(replaced)


def _move_missing(old: Path, new: Path) -> None:
    """Keeps what a renewed kit does not bring: state, cache, virtual environment, and kits of former sites."""
    if not new.exists():
        old.rename(new)
    elif old.is_dir():
        for path in old.iterdir():
            if not (new / path.name).exists():
                path.rename(new / path.name)


def _add(federation: Federation, missing: Sequence[str]) -> None:
    if not federation.kit("server").exists() or not federation.kit("operator").exists():
        raise UserError(f"{federation.kits} lacks the operator's or the server's kit; --force renews all")
    server = federation.kit("server")
    public_keys = server / "sites"
    _refuse_changes(read_federation(server / "federation.toml"), federation)
    with _new_folder(federation) as folder:
        keys, renewed = folder / ".sites", folder / ".federation.toml"  # no site's name begins with a dot
        keys.mkdir()
        for name in missing:
            site = federation.site(name)
            _site_kit(federation, site, folder / name, keys, federation.ca_certificate)
        for public in list(keys.iterdir()):
            public.rename(public_keys / public.name)
        _write_peers(federation, [folder / name for name in missing], public_keys)
        for name in missing:
            (folder / name).rename(federation.kits / name)
        names = {site.name for site in federation.sites}
        for public in public_keys.glob("*.pub"):
            if public.stem not in names:
                public.unlink()  # `register` then unregisters that site
        _write_federation(federation, renewed)
        renewed.rename(server / "federation.toml")


def _refuse_changes(old: Federation, new: Federation) -> None:
    """Raises UserError when the federation file changes what is written in existing kits; --add only adds sites."""
    before = old.model_dump(exclude={"sites", "kits"})
    after = new.model_dump(exclude={"sites", "kits"})
    changed = [key for key in after if before[key] != after[key]]
    old_sites = {site.name: site for site in old.sites}
    for site in new.sites:
        if site != old_sites.get(site.name, site):
            changed.append(f"site {site.name!r}")
    if changed:
        raise UserError(
            f"--add only adds sites, but the kits were written with another {', '.join(changed)}; "
            "set that back, or renew all with --force"
        )


def _build(federation: Federation, folder: Path) -> None:
    operator, server = folder / "operator", folder / "server"
    operator.mkdir(mode=0o700)
    server.mkdir(mode=0o700)
    ca = (operator / "ca.key", server / "ca.crt")
    write_ca(federation.name, federation.days, *ca)
    write_operator_key(operator / "apps.key", server / "operator.pub")
    files = (server / "server.key", server / "server.pem")
    write_server_certificate(federation.name, federation.server_names, federation.days, ca, files)
    public_keys = server / "sites"
    public_keys.mkdir()
    kits = []
    for site in federation.sites:
        kit = folder / site.name
        _site_kit(federation, site, kit, public_keys, ca[1])
        kits.append(kit)
    _write_peers(federation, kits, public_keys)
    _copy(
        "server",
        server,
        NAME=federation.name,
        PUBLIC=federation.public_address,
        CONTROL=federation.control_address,
        LISTEN=host_and_port(federation.listen_host, federation.port),
        NGINX=" and nginx" if federation.proxy == "nginx" else "",
        KIT=str(federation.kit("server")),
    )
    if federation.proxy == "none":
        (server / "nginx.conf").unlink()
    _write_env(
        server / "server.env",
        HOST=federation.control_host if federation.proxy == "nginx" else federation.listen_host,
        PORT=federation.control_port,  # without a proxy it is that of the sites
        PROXY=federation.proxy,
        PUBLIC=federation.public_address,
    )
    _write_federation(federation, server / "federation.toml")
    (server / "flwr").mkdir()


def _site_kit(federation: Federation, site: Site, kit: Path, public_keys: Path, ca_certificate: Path) -> None:
    kit.mkdir(mode=0o700)
    shutil.copyfile(ca_certificate, kit / "ca.crt")
    if site.key == "kit":
        write_site_key(site.name, kit / "key", public_keys / f"{site.name}.pub")
    if federation.wheel:
        shutil.copy(_wheel(federation), kit)
    if federation.pin:
        apps = kit / "apps"
        apps.mkdir()
        lines = [f"{digest} {name}\n" for name, digest in own_bundles().items()]
        (apps / "allowed").write_text("".join(lines))
        shutil.copyfile(ca_certificate.with_name("operator.pub"), kit / "operator.pub")
    _write_site_env(federation, site, kit)
    _write_site_texts(federation, site, kit)


def _write_site_env(federation: Federation, site: Site, kit: Path) -> None:
    """Writes what the scripts of a site read."""
    _write_env(
        kit / "site.env",
        SITE=site.name,
        DOMAIN=site.domain,
        ROLE=site.role,
        SUPERLINK=federation.public_address,
        DATA_DIR=site.data_dir,
        STATE_DIR=site.state_dir,
        CLIENT_USER=site.client_user,
        NODE_CONFIG="",
        PORT=site.port,
        RETRY_SECONDS=federation.retry_seconds,
        LONGEST_RETRY_SECONDS=federation.longest_retry_seconds,
        TRIES=federation.tries,
        TORCH_INDEX=federation.torch_index,
    )


def _write_site_texts(federation: Federation, site: Site, kit: Path) -> None:
    """Writes the scripts and the instructions of a site."""
    folders = []
    if site.data_dir:
        folders.append(f"{site.data_dir}:{site.data_dir}:ro")
    if site.state_dir:
        folders.append(f"{site.state_dir}:{site.state_dir}")
    packages = ""
    if federation.packages:
        packages = f" Runs also need `pip install {' '.join(federation.packages)}`."
    _copy(
        "site",
        kit,
        SITE=site.name,
        NAME=federation.name,
        DOMAIN=site.domain,
        ROLE="it trains" if site.role == "source" else "it evaluates the unseen domain and never trains",
        PUBLIC=federation.public_address,
        PACKAGES=packages,
        VOLUMES="".join(f"\n      - {json.dumps(folder)}" for folder in folders),
        DATA=f"`{site.data_dir}`" if site.data_dir else "empty: an embedded data set needs none",
    )


def _write_peers(federation: Federation, kits: Sequence[Path], public_keys: Path) -> None:
    """Writes the source sites' public keys by domain, with which sites check each other (`clients.identity`).

    Writes nothing when a site makes its key itself, or hides it from its client process, which then cannot sign.
    """
    sources = [site for site in federation.sites if site.role == "source"]
    if any(site.key == "site" or site.client_user for site in sources):
        return
    lines = []
    for site in sources:
        file = public_keys / f"{site.name}.pub"
        if file.is_file():
            key = file.read_text().split()[:2]
            lines.append(f"{' '.join(key)} {site.domain}\n")
    for kit in kits:
        (kit / "peers").write_text("".join(lines))


def _wheel(federation: Federation) -> Path:
    """Returns the wheel for the kits; a relative path is relative to the federation file's folder.

    Raises UserError when there is none.
    """
    wheel = federation.kits.parent / federation.wheel
    if wheel.suffix != ".whl" or not wheel.is_file():
        raise UserError(f"no wheel at {wheel}; `pip wheel --no-deps .` in fedsim's source folder builds it")
    return wheel


def write_connection(federation: Federation) -> None:
    """Writes the operator's `flwr` connection, whose certificate path must be absolute: again wherever the kit lies."""
    certificate = str(federation.ca_certificate.resolve())
    connection = {"address": federation.control_address, "root-certificates": certificate}
    table = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    federation.flwr_home.mkdir(mode=0o700, exist_ok=True)
    (federation.flwr_home / "config.toml").write_text(tomli_w.dumps(table))


def is_running(kit: Path) -> bool:
    """Whether a script of a kit runs."""
    return any(is_locked(file) for file in kit.glob("run/*lock"))


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock file, under which the kit's scripts run."""
    with file.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _write_federation(federation: Federation, file: Path) -> None:
    """Writes the federation as the server's kit holds it: the kits are its neighbours."""
    table = {**federation.model_dump(), "kits": ".."}
    file.write_text(tomli_w.dumps(table))


def _write_env(file: Path, **values: str | int) -> None:
    """Writes the variables that a kit's scripts read."""
    lines = []
    for name, value in values.items():
        quoted = shlex.quote(str(value))
        lines.append(f"{name}={quoted}\n")
    file.write_text("".join(lines))


def _copy(kind: str, kit: Path, **values: str) -> None:
    """Copies a kit's fixed files; texts get their @NAME@ words filled in, scripts have none."""
    for template in sorted((TEMPLATES / kind).iterdir()):
        text = template.read_text()
        file = kit / template.name
        if template.suffix == ".sh":
            file.write_text(text)
            file.chmod(0o755)
            continue
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        file.write_text(text)


@contextmanager
def _new_folder(federation: Federation) -> Iterator[Path]:
    """Makes a folder (0700) next to the kits, which is removed afterwards unless it was renamed."""
    parent = federation.kits.parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{federation.kits.name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
