"""The federation file: defaults, paths, and errors that name what is wrong."""

import pytest
from typer.testing import CliRunner

from fedsim.common.errors import UserError
from fedsim.deploy.cli import app
from fedsim.deploy.federation import is_federation, read_federation
from fedsim.settings.experiment import find_config


def test_what_is_left_open_is_filled_in(federation_file):
    """Kits beside the file; behind the proxy the control path is on loopback; a loopback address stays on loopback."""
    federation = read_federation(federation_file)
    assert federation.kits == federation_file.parent / "demo-kits"
    assert federation.kit("beta") == federation.kits / "beta"
    assert federation.control_address == "127.0.0.1:9093"
    assert federation.listen_host == "127.0.0.1"
    assert federation.server_names == ["127.0.0.1", "fl.example.org", "10.1.2.3", "localhost"]
    assert federation.clients("source") == ["rot0", "rot15", "rot30"]
    assert federation.clients("target") == ["rot45"]
    assert federation.sites[0].port == 9094


def test_without_a_proxy_the_public_port_is_the_control_path(federation_file):
    """The SuperLink listens on all addresses and calls itself on loopback."""
    text = federation_file.read_text().replace('address = "127.0.0.1"', 'address = "fl.example.org"\nproxy = "none"')
    federation_file.write_text(text)
    federation = read_federation(federation_file)
    assert federation.control_address == "127.0.0.1:9092"
    assert federation.listen_host == "0.0.0.0"
    assert federation.public_address == "fl.example.org:9092"


def test_an_ipv6_address_has_brackets_before_its_port(federation_file):
    """As flower-supernode wants it."""
    federation_file.write_text(federation_file.read_text().replace('"127.0.0.1"', '"2001:db8::1"'))
    federation = read_federation(federation_file)
    assert federation.public_address == "[2001:db8::1]:9092"
    assert "2001:db8::1" in federation.server_names


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("port = 9095", "prot = 9095", "site 'beta': unknown setting 'prot'; did you mean 'port'?"),
        ("address =", "adress =", "unknown setting 'adress'; did you mean 'address'?"),
        ('address = "127.0.0.1"', "", "address is missing"),
        ('"127.0.0.1"', '"https://fl.example.org:9092"', "address: a host is a name or an IP address, without scheme"),
        ('domain = "rot15"', 'domain = "rot0"', "two sites have the domain 'rot0'; several clients of one domain"),
        ('name = "beta"', 'name = "alpha"', "two sites have the name 'alpha'"),
        ('domain = "rot30"', 'role = "target"\ndomain = "ROT45"', "two sites have the target domain 'rot45'"),
        ('name = "beta"', 'name = "server"', "site 'server': name: a site's name is letters"),
        ('name = "beta"', 'name = "../x"', "site '../x': name: a site's name is letters"),
        ('role = "target"', 'role = "judge"', "site 'delta': role: Input should be 'source' or 'target' (got 'judge')"),
        ("port = 9096", "port = 70000", "site 'gamma': port: Input should be less than or equal to 65535"),
        ('"/data/of beta"', '"data"', "site 'beta': data_dir: a path on a site is absolute"),
        ('"/data/of beta"', '"/it\'s"', "site 'beta': data_dir: a path on a site is absolute"),
        ('name = "demo"', 'name = "demo"\nport = 9093', "port and the control port are the same"),
        ('name = "demo"', 'name = "demo"\ncontrol = "9093"', "control: host:port is needed"),
        ('name = "demo"', 'name = "demo"\nproxy = "none"\ncontrol = "127.0.0.1:9093"', "has one port, 9092: leave"),
        ('name = "demo"', 'name = "demo"\nlisten = "eth0"', "listen: an IP address is needed"),
        ('name = "demo"', "name = demo", "not valid TOML"),
    ],
)
def test_bad_input_is_one_line(federation_file, old, new, message):
    """File, site, key and the way out; nothing else."""
    text = federation_file.read_text()
    assert old in text
    federation_file.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        read_federation(federation_file)
    assert message in str(error.value)
    assert str(error.value).startswith(str(federation_file))
    assert "\n" not in str(error.value)


def test_no_file_is_one_line(tmp_path):
    """The reason of the system."""
    with pytest.raises(UserError, match=r"cannot read the federation file .*No such file"):
        read_federation(tmp_path / "federation.toml")


def test_an_unknown_site_names_the_nearest(federation_file):
    """For commands that take a site."""
    with pytest.raises(UserError, match=r"no site .alfa. in the federation; did you mean .alpha."):
        read_federation(federation_file).kit("alfa")


def test_check_takes_the_file_in_the_place_of_an_experiment(federation, federation_file, monkeypatch):
    """As `register FILE` does; earlier it was read as an experiment with an unknown setting 'address'."""
    asked = []
    monkeypatch.setattr("fedsim.deploy.check.check", lambda *given: asked.append(given) or ([], []))
    result = CliRunner().invoke(app, ["check", str(federation_file)])
    assert (result.exit_code, result.exception) == (0, None)
    ((described, experiment, _),) = asked
    assert (described.name, experiment) == ("demo", None)
    assert not is_federation("digits")
    assert not is_federation(str(find_config("digits")))
