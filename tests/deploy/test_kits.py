"""The federation file, and kits: complete, private, never written over by accident, scripts that a shell accepts."""

import fcntl
import os
import re
import shutil
import stat
import subprocess

import pytest
from cryptography import x509
from demo import NGINX, edit, files_in
from typer.testing import CliRunner

from fedsim.common.errors import UserError
from fedsim.deploy import kits
from fedsim.deploy.cli import app
from fedsim.deploy.federation import is_federation, read_federation
from fedsim.deploy.kits import init, is_locked
from fedsim.settings.experiment import find_config

SERVER = {
    "README.md", "ca.crt", "compose.yaml", "federation.toml", "flwr", "nginx.conf", "server.env", "server.key",
    "server.pem", "sites", "start.sh", "stop.sh", "operator.pub",
}  # fmt: skip
SITE = {
    "README.md", "apps", "ca.crt", "compose.yaml", "key", "operator.pub", "peers", "site.env", "start.sh", "stop.sh",
    "supervise.sh",
}  # fmt: skip
OPERATOR = {"apps.key", "ca.key"}
PRIVATE = {*OPERATOR, "server.key", "key"}
NEW_SITE = '\n[[sites]]\nname = "epsilon"\ndomain = "rot60"\nport = 9098\n'


def names(folder):
    return {path.name for path in folder.iterdir()}


def variables(file):
    """What a shell reads from an env file."""
    keys = [line.partition("=")[0] for line in file.read_text().splitlines()]
    script = f'. "{file}"; ' + "; ".join(f'printf "%s\\0" "${key}"' for key in keys)
    values = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\0")
    return dict(zip(keys, values))


def test_one_kit_per_machine_with_no_other_machines_secrets(federation):
    sites = {site.name: SITE for site in federation.sites}
    kits = {kit.name: names(kit) for kit in federation.kits.iterdir()}
    assert kits == {"operator": OPERATOR, "server": SERVER, **sites}
    assert names(federation.kit("server") / "sites") == {f"{site}.pub" for site in sites}
    private = [path for path in federation.kits.rglob("*") if path.name in PRIVATE]
    assert len({path.read_bytes() for path in private}) == len(private) == 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert {stat.S_IMODE(kit.stat().st_mode) for kit in [federation.kits, *federation.kits.iterdir()]} == {0o700}
    certificate = x509.load_pem_x509_certificate((federation.kit("server") / "server.pem").read_bytes())
    hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(host.value) for host in hosts} == set(federation.server_names)


def test_settings_reach_the_scripts_and_the_servers_federation_works_where_its_kit_lies(federation, tmp_path):
    beta = variables(federation.kit("beta") / "site.env")
    given = {"DATA_DIR": "/data/of beta", "SITE": "beta", "DOMAIN": "rot15", "ROLE": "source", "PORT": "9095"}
    assert beta.items() >= {**given, "SUPERLINK": "127.0.0.1:9092"}.items()
    assert variables(federation.kit("delta") / "site.env")["ROLE"] == "target"
    server = variables(federation.kit("server") / "server.env")
    assert server == {"HOST": "127.0.0.1", "PORT": "9093", "PROXY": "nginx", "PUBLIC": "127.0.0.1:9092"}
    texts = [path.read_text() for path in federation.kits.rglob("*") if path.suffix in (".md", ".conf")]
    assert len(texts) == 6
    assert not [word for text in texts for word in text.split("`") if word.startswith("@") and word.endswith("@")]
    moved = shutil.copytree(federation.kit("server"), tmp_path / "elsewhere" / "server")
    there = read_federation(moved / "federation.toml")
    assert there.ca_certificate.resolve() == (moved / "ca.crt").resolve()
    assert there.model_copy(update={"kits": federation.kits}) == federation


def test_scripts_are_bash_and_nginx_accepts_its_configuration(federation):
    kit = federation.kit("server")
    scripts = [*kit.glob("*.sh"), *federation.kit("alpha").glob("*.sh")]
    assert len(scripts) == 5
    for script in scripts:
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)
    if NGINX is None:
        pytest.skip("nginx is not installed")
    (kit / "run").mkdir()
    words = [NGINX, "-t", "-p", f"{kit}/", "-e", "run/nginx.log", "-c", kit / "nginx.conf"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, r"has kits already .*alpha.*--add .*--force renews"),
        ({"force": True, "add": True}, "choose one"),
        ({"force": True}, r"beta runs from .*stop.sh before --force"),
    ],
)
def test_what_init_refuses_leaves_every_byte(federation, words, said):
    """The scripts of a kit that runs hold run/lock."""
    (federation.kit("beta") / "run").mkdir()
    lock = federation.kit("beta") / "run" / "lock"
    lock.touch()
    assert not is_locked(lock)
    before = files_in(federation.kits)
    with lock.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=said):
            init(federation, **words)
    assert files_in(federation.kits) == before
    assert names(federation.kits.parent) == {"federation.toml", "demo-kits"}


def test_a_failure_leaves_nothing(federation_file, monkeypatch):
    """The third of four site kits cannot be written. A folder with other things is left alone."""

    def fail_at_gamma(site, key_file, public_file):
        if site == "gamma":
            raise OSError("disk full")
        write(site, key_file, public_file)

    write = kits.write_site_key
    monkeypatch.setattr(kits, "write_site_key", fail_at_gamma)
    federation = read_federation(federation_file)
    with pytest.raises(OSError, match="disk full"):
        init(federation)
    assert names(federation_file.parent) == {"federation.toml"}
    monkeypatch.undo()
    federation.kits.mkdir()
    (federation.kits / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds something else than kits"):
        init(federation)
    assert files_in(federation.kits) == {"thesis.tex": b"x"}


def test_force_renews_keys_and_keeps_what_lives_in_the_kits_and_kits_of_former_sites(federation_file):
    federation = read_federation(federation_file)
    init(federation)
    before = files_in(federation.kits)
    for folder, file in (("alpha/state", "personal.bin"), ("former", "key")):
        (federation.kits / folder).mkdir()
        (federation.kits / folder / file).write_text(file)
    init(federation, force=True)
    after = files_in(federation.kits)
    assert [after.pop(name) for name in ("alpha/state/personal.bin", "former/key")] == [b"personal.bin", b"key"]
    assert after.keys() == before.keys()
    keys = {name for name in before if name.endswith(("key", ".pub", ".crt", ".pem", "peers"))}
    assert {name for name in before if before[name] != after[name]} == keys


@pytest.mark.parametrize("name", ["epsilon", "sites", "federation.toml"])  # next to which the new kits are written
def test_add_writes_new_sites_with_the_same_authority_and_changes_nothing_else(name, federation, federation_file):
    before = files_in(federation.kits)
    federation_file.write_text(federation_file.read_text() + NEW_SITE.replace("epsilon", name))
    larger = read_federation(federation_file)
    assert init(larger, add=True) == [larger.kit(name)]
    after = files_in(larger.kits)
    kit = {f"{name}/{file}" for file in (SITE - {"apps"}) | {"apps/allowed"}}
    assert after.keys() - before.keys() == kit | {f"server/sites/{name}.pub"}
    assert {name for name in before if before[name] != after[name]} == {"server/federation.toml"}
    assert after[f"{name}/ca.crt"] == before["alpha/ca.crt"]
    assert read_federation(larger.kit("server") / "federation.toml").sites[-1].name == name


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [("fl.example.org", "fl2.example.org", "names"), ("port = 9095", "port = 9099", "site 'beta'")],
)
def test_add_changes_no_existing_kit(federation, federation_file, old, new, named):
    edit(federation_file, old, new)
    federation_file.write_text(federation_file.read_text() + NEW_SITE)
    before = files_in(federation.kits)
    with pytest.raises(UserError, match=f"with another {named}"):
        init(read_federation(federation_file), add=True)
    assert files_in(federation.kits) == before


def test_a_site_that_left_the_file_loses_its_registration_and_keeps_its_kit(federation, federation_file):
    federation_file.write_text(federation_file.read_text().partition('[[sites]]\nname = "delta"')[0])
    assert init(read_federation(federation_file), add=True) == []
    assert names(federation.kit("server") / "sites") == {"alpha.pub", "beta.pub", "gamma.pub"}
    assert federation.kit("delta").is_dir()


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
    ((described, experiment, *_),) = asked
    assert (described.name, experiment) == ("demo", None)
    assert not is_federation("digits")
    assert not is_federation(str(find_config("digits")))
