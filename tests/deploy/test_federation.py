"""The federation file: defaults, paths, and errors that name what is wrong."""

import re

import pytest
from demo import edit
from typer.testing import CliRunner

from fedsim.common.errors import UserError
from fedsim.deploy.cli import app
from fedsim.deploy.federation import is_federation, read_federation
from fedsim.deploy.kits import init
from fedsim.settings.experiment import find_config


def test_what_is_left_open_is_filled_in(federation_file):
    federation = read_federation(federation_file)
    assert federation.kits == federation_file.parent / "demo-kits"
    assert federation.kit("beta") == federation.kits / "beta"
    assert federation.control_address == "127.0.0.1:9093"  # behind the proxy
    assert federation.listen_host == "127.0.0.1"
    assert federation.server_names == ["127.0.0.1", "fl.example.org", "10.1.2.3", "localhost"]
    assert federation.clients("source") == ["rot0", "rot15", "rot30"]
    assert federation.clients("target") == ["rot45"]
    assert federation.sites[0].port == 9094
    with pytest.raises(UserError, match=r"no site .alfa. in the federation; did you mean .alpha."):
        federation.kit("alfa")
    with pytest.raises(UserError, match=r"cannot read the federation file .*No such file"):
        read_federation(federation_file.with_name("none.toml"))


def test_without_a_proxy_the_public_port_is_the_control_path_and_an_ipv6_address_has_brackets(federation_file):
    edit(federation_file, 'address = "127.0.0.1"', 'address = "2001:db8::1"\nproxy = "none"')
    federation = read_federation(federation_file)
    assert federation.control_address == "127.0.0.1:9092"
    assert federation.listen_host == "0.0.0.0"
    assert federation.public_address == "[2001:db8::1]:9092"
    assert "2001:db8::1" in federation.server_names
    init(federation)
    assert not (federation.kit("server") / "nginx.conf").exists()
    assert "PORT=9092\n" in (federation.kit("server") / "server.env").read_text()


NAME = 'name = "demo"'
WRONG = [
    ("port = 9095", "prot = 9095", "site 'beta': unknown setting 'prot'; did you mean 'port'?"),
    ('address = "127.0.0.1"', "", "address is missing"),
    ('"127.0.0.1"', '"https://fl.example.org:9092"', "address: a host is a name or an IP address, without scheme"),
    ('domain = "rot15"', 'domain = "ROT0"', "two sites have the domain 'rot0'; several clients of one domain"),
    ('name = "beta"', 'name = "alpha"', "two sites have the name 'alpha'"),
    ('domain = "rot30"', 'role = "target"\ndomain = "ROT45"', "two sites have the target domain 'rot45'"),
    ('name = "beta"', 'name = "../x"', "site '../x': name: a site's name is letters"),
    ('role = "target"', 'role = "judge"', "site 'delta': role: Input should be 'source' or 'target' (got 'judge')"),
    ("port = 9096", "port = 70000", "site 'gamma': port: Input should be less than or equal to 65535"),
    ('"/data/of beta"', '"/it\'s"', "site 'beta': data_dir: a path on a site is absolute"),
    (NAME, f"{NAME}\nport = 9093", "port and the control port are the same"),
    (NAME, f'{NAME}\nproxy = "none"\ncontrol = "127.0.0.1:9093"', "has one port, 9092: leave"),
    (NAME, f'{NAME}\nlisten = "eth0"', "listen: an IP address is needed"),
    (NAME, "name = demo", "not valid TOML"),
    *((NAME, f'{NAME}\ncontrol = "{bad}"', "control: host:port is needed, with a port from 1 to 65535")
      for bad in ("9093", "127.0.0.1:99999", "127.0.0.1:0", "a b;c:1", ":9093", "::1:9093x", "[x]:1")),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_bad_input_is_one_line(federation_file, old, new, message):
    edit(federation_file, old, new)
    with pytest.raises(UserError, match=rf"^{re.escape(str(federation_file))}.*{re.escape(message)}.*\Z"):
        read_federation(federation_file)


def test_check_takes_the_file_in_the_place_of_an_experiment(federation, federation_file, monkeypatch):
    asked = []
    monkeypatch.setattr("fedsim.deploy.check.check", lambda *given: asked.append(given) or ([], []))
    result = CliRunner().invoke(app, ["check", str(federation_file)])
    assert (result.exit_code, result.exception) == (0, None)
    ((described, experiment, _),) = asked
    assert (described.name, experiment) == ("demo", None)
    assert not is_federation("digits")
    assert not is_federation(str(find_config("digits")))
