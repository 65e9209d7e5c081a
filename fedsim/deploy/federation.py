"""A federation on separate machines, described by one TOML file, and the folders of its kits and keys.

    federation = read_federation("federation.toml")
    federation.kit("hospital-a") / "start.sh"

Relative paths are relative to the TOML file's folder.
"""

import ipaddress
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator, model_validator

from fedsim.common.errors import UserError, nearest
from fedsim.settings import Settings

CONNECTION = "federation"  # name of the SuperLink connection in the server kit's config.toml
RESERVED = ("server", "operator")  # names of kits that belong to no site
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def _like(pattern: str, rule: str) -> AfterValidator:
    """The check of a text that must be of this form as a whole."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


Domain = Annotated[
    str, _like(r"[^'\"\\\n/]+(/[0-9]+)?", "a domain is a name without quotes, or name/k for one of its clients")
]
User = Annotated[str, _like(r"([a-z0-9_][a-z0-9_-]{0,31})?", "a user's name is small letters, digits, '_' or '-'")]
SitePath = Annotated[str, _like(r"(/[^'\"\\\n]*)?", "a path on a site is absolute and has no quotes or backslashes")]


class Site(Settings):
    """[[sites]]: one machine with the data of one client."""

    name: str = Field(description="the site's own name: its kit's folder, its key's name")
    domain: Domain = Field(description="the domain that it holds; with several clients per domain, e.g. photo/1")
    role: Literal["source", "target"] = Field(
        "source", description="source: trains; target: evaluates the unseen domain and never trains"
    )
    data_dir: SitePath = Field("", description="absolute path of the data set on the site; empty: embedded data")
    state_dir: SitePath = Field(
        "", description="absolute path of the client's state; empty: `state` in the kit's folder"
    )
    key: Literal["kit", "site"] = Field(
        "kit",
        description="who makes the site's key: kit: init; site: its start.sh, and the operator gets the public half",
    )
    client_user: User = Field(
        "", description="user as whom the client process runs, without access to the key; start.sh is called by root"
    )
    port: int = Field(9094, ge=1, le=65535, description="loopback port of the SuperNode; differs for sites on one host")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not NAME.fullmatch(name) or name in RESERVED:
            raise ValueError(f"a site's name is letters, digits, '.', '_' or '-', and not {' or '.join(RESERVED)}")
        return name


class Federation(Settings):
    """One server, its sites, and the operator who starts runs."""

    name: Annotated[str, _like(NAME.pattern, "a federation's name is letters, digits, '.', '_' or '-'")] = Field(
        "federation", description="the federation's name, in its certificates"
    )
    address: str = Field(description="host name or IP address by which the sites reach the server")
    port: int = Field(9092, ge=1, le=65535, description="the server's port that the sites reach")
    proxy: Literal["nginx", "none"] = Field(
        "nginx",
        description="nginx: only the sites' paths are reachable from outside, the SuperLink listens on loopback; "
        "none: the SuperLink itself listens on the port, and everybody who reaches it can start runs",
    )
    listen: str = Field("", description="IP address of the port; empty: all (loopback for a loopback address)")
    control: str = Field(
        "",
        description="host:port of the SuperLink itself, where the operator starts runs; empty: 127.0.0.1:9093, or the "
        "port of the sites without a proxy",
    )
    names: list[str] = Field([], description="further host names and IP addresses in the server's certificate")
    days: int = Field(365, ge=1, le=3650, description="validity of the certificates")
    kits: Path = Field(Path(), description="folder of the kits; empty: <name>-kits next to the TOML file")
    wheel: str = Field(
        "",
        description="fedsim's wheel, to be put into the kits: a site's start.sh installs it where fedsim is missing",
    )
    torch_index: str = Field(
        "", description="pip's index for PyTorch there, e.g. that of its CPU builds; empty: pip's own"
    )
    packages: list[str] = Field(
        [], description="packages, in pip's form, that runs need at every site: methods or data sets from outside"
    )
    pin: bool = Field(
        True, description="sites run fedsim's own app bundles and those that the operator's key signed, and no others"
    )
    retry_seconds: int = Field(10, ge=1, description="a site's first wait before it starts its SuperNode again")
    longest_retry_seconds: int = Field(300, ge=1, description="a site's longest wait, reached by doubling")
    largest_reply_mb: int = Field(
        2048, ge=1, le=1 << 20, description="the server takes no larger reply (MiB), whatever a run expects"
    )
    tries: int = Field(0, ge=0, description="refused starts in a row after which a site gives up; 0: never")
    sites: list[Site] = Field(min_length=1)

    @field_validator("address", "names")
    @classmethod
    def _hosts(cls, value: str | list[str]) -> str | list[str]:
        for host in [value] if isinstance(value, str) else value:
            if not is_ip(host) and not HOST.fullmatch(host):
                raise ValueError("a host is a name or an IP address, without scheme and port")
        return value

    @field_validator("listen")
    @classmethod
    def _ip(cls, value: str) -> str:
        if value and not is_ip(value):
            raise ValueError("an IP address is needed, e.g. 0.0.0.0")
        return value

    @field_validator("control")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (is_host(host) and is_port(port)):
            raise ValueError("host:port is needed, with a port from 1 to 65535, e.g. 127.0.0.1:9093")
        return value

    @model_validator(mode="after")
    def _distinct(self) -> "Federation":
        # Upper and lower case are one domain. One site may hold it as a source, and another as the unseen one.
        names = [site.name for site in self.sites]
        domains = [name.casefold() for name in self.clients("source")]
        unseen = [name.casefold() for name in self.clients("target")]
        refuse_twice("name", names)
        refuse_twice("domain", domains, "; several clients of one domain are called name/0, name/1, ...")
        refuse_twice("target domain", unseen)
        if self.proxy == "nginx" and self.control_port == self.port:
            raise ValueError("port and the control port are the same; behind a proxy they must differ")
        if self.proxy == "none" and self.control_port != self.port:
            raise ValueError(
                f"without a proxy the SuperLink has one port, {self.port}: leave control out, or give it that port"
            )
        return self

    def clients(self, role: str) -> list[str]:
        """Returns the client names (domains) of the sites with that role, in the file's order."""
        return [site.domain for site in self.sites if site.role == role]

    def site(self, name: str) -> Site:
        """Returns the site of that name; raises UserError with the nearest one."""
        by_name = {site.name: site for site in self.sites}
        if name not in by_name:
            names = ", ".join(by_name)
            raise UserError(f"no site {name!r} in the federation; {nearest(name, by_name)}known: {names}")
        return by_name[name]

    @property
    def control_address(self) -> str:
        """host:port at which the operator reaches the SuperLink."""
        port = 9093 if self.proxy == "nginx" else self.port
        return self.control or f"127.0.0.1:{port}"

    @property
    def control_host(self) -> str:
        """Host of `control_address`, without brackets."""
        return self.control_address.rpartition(":")[0].strip("[]")

    @property
    def control_port(self) -> int:
        """Port of `control_address`."""
        return int(self.control_address.rpartition(":")[2])

    @property
    def public_address(self) -> str:
        """host:port at which the sites reach the server."""
        return host_and_port(self.address, self.port)

    @property
    def listen_host(self) -> str:
        """IP address on which the public port listens."""
        loopback = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}
        return self.listen or loopback.get(self.address, "0.0.0.0")

    @property
    def server_names(self) -> list[str]:
        """Every host name and IP address by which the server is reached, for its certificate."""
        hosts = [self.address, *self.names, self.control_host, "localhost", "127.0.0.1"]
        if self.listen_host != "0.0.0.0":
            hosts.append(self.listen_host)
        return list(dict.fromkeys(hosts))

    def kit(self, name: str) -> Path:
        """Returns the folder of a kit: of "server", "operator" or a site's name; raises UserError for another name."""
        folder = name if name in RESERVED else self.site(name).name
        return self.kits / folder

    @property
    def ca_certificate(self) -> Path:
        """The federation's CA certificate, as the operator and the SuperLink read it."""
        return self.kit("server") / "ca.crt"

    @property
    def flwr_home(self) -> Path:
        """FLWR_HOME of the operator's `flwr`, whose config.toml has the connection CONNECTION."""
        return self.kit("server") / "flwr"


def is_ip(host: str) -> bool:
    """Whether this is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_host(text: str) -> bool:
    """Whether this is a host name or an IP address, of which one in brackets is an address."""
    if text.startswith("["):
        return is_ip(text[1:-1])
    return is_ip(text) or HOST.fullmatch(text) is not None


def is_port(text: str) -> bool:
    """Whether this is the number of a port."""
    return re.fullmatch("[0-9]{1,5}", text) is not None and 1 <= int(text) <= 65535


def refuse_twice(what: str, values: Sequence[str], hint: str = "") -> None:
    """Raises ValueError when two sites have one of these values."""
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"two sites have the {what} {twice[0]!r}{hint}")


def host_and_port(host: str, port: int) -> str:
    """Returns an address, with brackets around an IPv6 one."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_federation(path: str) -> bool:
    """Whether this is a TOML file with sites, which no experiment has."""
    try:
        return "sites" in tomllib.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError):  # what is wrong with it is said where it is read
        return False


def read_federation(path: str | Path) -> Federation:
    """Returns the federation of a TOML file; raises UserError that names the wrong key and the nearest right one."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the federation file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    name = table.get("name", "federation")
    kits = path.resolve().parent / str(table.get("kits") or f"{name}-kits")
    try:
        return Federation.model_validate({**table, "kits": kits})
    except ValidationError as error:
        raise UserError(f"{path}: {_explain(error, table)}") from None


def _explain(error: ValidationError, table: dict[str, Any]) -> str:
    """Returns the first problem of a validation error in one line, with the site's name where it is in a site."""
    problems = error.errors()
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])  # often the typo
    place = list(problem["loc"])
    section: type[BaseModel] = Federation
    where = ""
    if len(place) > 1 and place[0] == "sites" and isinstance(place[1], int):
        number = place[1]
        entry = table["sites"][number]
        if isinstance(entry, dict):
            name = entry.get("name", number + 1)
            where = f"site {name!r}: "
        else:
            where = f"sites[{number}]: "
        section = Site
        place = place[2:]
    key = ".".join(str(part) for part in place)
    fields = list(section.model_fields)
    if problem["type"] == "extra_forbidden":
        return f"{where}unknown setting {key!r}; {nearest(key, fields)}known here: {', '.join(fields)}"
    if problem["type"] == "missing":
        return f"{where}{key} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if not key:
        return f"{where}{message}"
    return f"{where}{key}: {message} (got {problem.get('input')!r})"
