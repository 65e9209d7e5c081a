"""Kits: complete, private, never written over by accident, scripts that a shell accepts."""

import fcntl
import os
import shutil
import stat
import subprocess

import pytest
from cryptography import x509

from fedsim.common.errors import UserError
from fedsim.deploy.federation import read_federation
from fedsim.deploy.kits import init, is_locked

SERVER = {
    "README.md", "ca.crt", "federation.toml", "flwr", "nginx.conf", "server.env", "server.key", "server.pem", "sites",
    "start.sh", "stop.sh", "operator.pub",
}  # fmt: skip
SITE = {"README.md", "apps", "ca.crt", "key", "operator.pub", "site.env", "start.sh", "stop.sh", "supervise.sh"}
PRIVATE = {"apps.key", "ca.key", "server.key", "key"}


def contents(folder):
    """Bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def variables(file):
    """What a shell reads from an env file."""
    names = [line.partition("=")[0] for line in file.read_text().splitlines()]
    script = f'. "{file}"; ' + "; ".join(f'printf "%s\\0" "${name}"' for name in names)
    values = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\0")
    return dict(zip(names, values))


def test_one_kit_per_machine(federation):
    """Each with all it needs and no other machine's secrets."""
    assert {kit.name for kit in federation.kits.iterdir()} == {"operator", "server", "alpha", "beta", "gamma", "delta"}
    assert {path.name for path in federation.kit("server").iterdir()} == SERVER
    assert {path.name for path in federation.kit("operator").iterdir()} == {"apps.key", "ca.key"}
    for site in federation.sites:
        assert {path.name for path in federation.kit(site.name).iterdir()} == SITE
    keys = [path.read_bytes() for path in federation.kits.rglob("*") if path.name in PRIVATE]
    assert len(set(keys)) == len(keys) == 7
    names = {f"{site.name}.pub" for site in federation.sites}
    assert {path.name for path in (federation.kit("server") / "sites").iterdir()} == names


def test_nobody_else_can_read_a_kit(federation):
    """Folders 0700, private files 0600."""
    for kit in [federation.kits, *federation.kits.iterdir()]:
        assert stat.S_IMODE(kit.stat().st_mode) == 0o700
    for path in federation.kits.rglob("*"):
        if path.name in PRIVATE:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_settings_reach_the_scripts(federation):
    """Blanks in paths included."""
    beta = variables(federation.kit("beta") / "site.env")
    assert beta["DATA_DIR"] == "/data/of beta"
    assert (beta["SITE"], beta["DOMAIN"], beta["ROLE"], beta["PORT"]) == ("beta", "rot15", "source", "9095")
    assert beta["SUPERLINK"] == "127.0.0.1:9092"
    assert variables(federation.kit("delta") / "site.env")["ROLE"] == "target"
    assert variables(federation.kit("server") / "server.env") == {
        "HOST": "127.0.0.1",
        "PORT": "9093",
        "PROXY": "nginx",
        "PUBLIC": "127.0.0.1:9092",
    }
    texts = [path for path in federation.kits.rglob("*") if path.suffix in (".md", ".conf")]
    assert len(texts) == 6
    for text in texts:
        assert not [word for word in text.read_text().split("`") if word.startswith("@") and word.endswith("@")]


def test_the_servers_kit_knows_the_federation(federation):
    """Its federation.toml works where the kit lies, also on another machine."""
    moved = federation.kits.parent / "elsewhere" / "server"
    moved.parent.mkdir()
    shutil.copytree(federation.kit("server"), moved)
    there = read_federation(moved / "federation.toml")
    assert there.ca_certificate.resolve() == (moved / "ca.crt").resolve()
    assert there.model_copy(update={"kits": federation.kits}) == federation


@pytest.mark.parametrize(
    "script", ["server/start.sh", "server/stop.sh", "site/start.sh", "site/supervise.sh", "site/stop.sh"]
)
def test_scripts_are_bash(federation, script):
    """Executable, and parsed without complaint."""
    kind, name = script.split("/")
    file = federation.kit("server" if kind == "server" else "alpha") / name
    assert os.access(file, os.X_OK)
    subprocess.run(["bash", "-n", file], check=True)


def test_nginx_accepts_its_configuration(federation):
    """`nginx -t` reads the certificates too."""
    nginx = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    kit = federation.kit("server")
    (kit / "run").mkdir()
    done = subprocess.run(
        [nginx, "-t", "-p", f"{kit}/", "-e", "run/nginx.log", "-c", kit / "nginx.conf"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_without_a_proxy_there_is_no_proxy_configuration(federation_file):
    """And the SuperLink takes the public port."""
    federation_file.write_text(federation_file.read_text().replace('name = "demo"', 'name = "demo"\nproxy = "none"', 1))
    federation = read_federation(federation_file)
    init(federation)
    assert not (federation.kit("server") / "nginx.conf").exists()
    assert variables(federation.kit("server") / "server.env")["PORT"] == "9092"


def test_nothing_is_overwritten(federation):
    """Called again, init refuses and says what there is; not a byte changes, nothing is left beside the kits."""
    before = contents(federation.kits)
    with pytest.raises(UserError, match=r"has kits already .*alpha.*--add .*--force renews"):
        init(federation)
    assert contents(federation.kits) == before
    assert {path.name for path in federation.kits.parent.iterdir()} == {"federation.toml", "demo-kits"}


def test_a_folder_with_other_things_is_left_alone(federation_file):
    """Somebody's folder of that name."""
    federation = read_federation(federation_file)
    federation.kits.mkdir()
    (federation.kits / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds something else than kits"):
        init(federation)
    assert contents(federation.kits) == {"thesis.tex": b"x"}


def test_a_failure_leaves_nothing(federation_file, monkeypatch):
    """All or nothing: the third of four site kits cannot be written."""
    federation = read_federation(federation_file)

    def fail_at_gamma(site, key_file, public_file):
        if site == "gamma":
            raise OSError("disk full")
        write(site, key_file, public_file)

    from fedsim.deploy import kits

    write = kits.write_site_key
    monkeypatch.setattr(kits, "write_site_key", fail_at_gamma)
    with pytest.raises(OSError, match="disk full"):
        init(federation)
    assert {path.name for path in federation.kits.parent.iterdir()} == {"federation.toml"}


def test_force_renews_keys_and_keeps_what_lives_in_the_kits(federation):
    """State, virtual environments and kits of former sites stay."""
    before = contents(federation.kits)
    (federation.kit("alpha") / "state").mkdir()
    (federation.kit("alpha") / "state" / "personal.bin").write_text("bn")
    (federation.kits / "former").mkdir()
    (federation.kits / "former" / "key").write_text("k")
    init(federation, force=True)
    after = contents(federation.kits)
    assert after.pop("alpha/state/personal.bin") == b"bn"
    assert after.pop("former/key") == b"k"
    assert after.keys() == before.keys()
    renewed = {name for name in before if before[name] != after[name]}
    keys = {name for name in before if name.endswith(("key", ".pub", ".crt", ".pem"))}
    assert renewed == keys


def test_force_refuses_while_a_kit_runs(federation):
    """The scripts hold run/lock; nothing changes."""
    (federation.kit("beta") / "run").mkdir()
    lock = federation.kit("beta") / "run" / "lock"
    lock.touch()
    assert not is_locked(lock)
    before = contents(federation.kits)
    with lock.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"beta runs from .*stop.sh before --force"):
            init(federation, force=True)
    assert contents(federation.kits) == before


NEW_SITE = '\n[[sites]]\nname = "epsilon"\ndomain = "rot60"\nport = 9098\n'


def test_add_writes_new_sites_with_the_same_authority(federation, federation_file):
    """Nothing else changes but the server's list of sites."""
    before = contents(federation.kits)
    federation_file.write_text(federation_file.read_text() + NEW_SITE)
    larger = read_federation(federation_file)
    assert init(larger, add=True) == [larger.kit("epsilon")]
    after = contents(larger.kits)
    new = after.keys() - before.keys()
    files = (SITE - {"apps"}) | {"apps/allowed"}
    assert new == {f"epsilon/{name}" for name in files} | {"server/sites/epsilon.pub"}
    assert {name for name in before if before[name] != after[name]} == {"server/federation.toml"}
    assert after["epsilon/ca.crt"] == before["alpha/ca.crt"]
    assert [site.name for site in read_federation(larger.kit("server") / "federation.toml").sites][-1] == "epsilon"
    assert init(larger, add=True) == []


@pytest.mark.parametrize("name", ["sites", "federation.toml"])
def test_a_new_site_may_have_any_name(name, federation, federation_file):
    """The new kits are written beside the files that the server's kit gets."""
    federation_file.write_text(federation_file.read_text() + NEW_SITE.replace("epsilon", name))
    larger = read_federation(federation_file)
    assert init(larger, add=True) == [larger.kit(name)]
    assert (larger.kit("server") / "sites" / f"{name}.pub").is_file()
    assert read_federation(larger.kit("server") / "federation.toml").sites[-1].name == name


def test_a_site_that_left_the_file_loses_its_registration(federation, federation_file):
    """Its public key goes; its kit stays for whoever owns it."""
    federation_file.write_text(federation_file.read_text().partition('[[sites]]\nname = "delta"')[0])
    assert init(read_federation(federation_file), add=True) == []
    assert {file.stem for file in (federation.kit("server") / "sites").iterdir()} == {"alpha", "beta", "gamma"}
    assert federation.kit("delta").is_dir()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('names = ["fl.example.org"', 'names = ["fl2.example.org"', "names"),
        ("port = 9095", "port = 9099", "site 'beta'"),
    ],
)
def test_add_changes_no_existing_kit(federation, federation_file, old, new, named):
    """What is in a kit already can only be renewed."""
    text = federation_file.read_text()
    assert old in text
    federation_file.write_text(text.replace(old, new) + NEW_SITE)
    before = contents(federation.kits)
    with pytest.raises(UserError, match=f"with another {named}"):
        init(read_federation(federation_file), add=True)
    assert contents(federation.kits) == before


def test_add_and_force_exclude_each_other(federation):
    """One line."""
    with pytest.raises(UserError, match="choose one"):
        init(federation, force=True, add=True)


def test_the_certificate_has_every_name(federation):
    """Address, further names, and the control path's host."""
    certificate = x509.load_pem_x509_certificate((federation.kit("server") / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(name.value) for name in names} == set(federation.server_names)
