"""The Dockerfile, the kits' compose files, and DEPLOY.md: its federation is valid, its commands exist."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer
import yaml
from demo import TOML, edit

from fedsim.commands.cli import app
from fedsim.deploy.federation import Federation, Site, read_federation
from fedsim.deploy.kits import TEMPLATES, init

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
START, PAGE = (ROOT / "docs" / "start.md").read_text(), (TEMPLATES.parent / "DEPLOY.md").read_text()
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.DOTALL | re.MULTILINE))


def test_images_have_all_that_the_wheel_is_built_of():
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = wheel["tool"]["hatch"]["build"]["targets"]["wheel"]
    own = {wheel["project"]["readme"], *wheel["project"]["license-files"], "pyproject.toml"}
    assert copied == {*built["packages"], *built["force-include"], *own}
    assert all((ROOT / name).exists() for name in copied)
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert let_in == copied


def test_images_start_what_the_kits_hold_and_pages_name_their_targets():
    for stage in ("server", "site"):
        assert 'CMD ["./start.sh", "--foreground"]' in STAGES[stage]
        assert "--foreground" in (TEMPLATES / stage / "start.sh").read_text()
    assert set(re.findall(r"--target (\S+) -t", START + PAGE)) == STAGES.keys() - {"base"}


@pytest.mark.parametrize(("tool", "file"), [
    ("hadolint", "Dockerfile"), ("yamllint", "docs/clusters/rayjob.yaml"), ("shellcheck", "docs/clusters/ray.sbatch"),
])  # fmt: skip
def test_a_linter_finds_nothing(tool, file):
    found = shutil.which(tool, path=Path(sys.executable).parent)
    if found is None:
        pytest.skip(f"{tool} is not installed (it comes with the extra dev)")
    done = subprocess.run([found, file], cwd=ROOT, capture_output=True, text=True)
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


def blocks(language: str, text: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_federation_on_the_page_can_be_provisioned_and_names_every_key(tmp_path):
    example, *_ = blocks("toml")
    (tmp_path / "federation.toml").write_text(example)
    federation = read_federation(tmp_path / "federation.toml")
    assert federation.wheel, "without it a site's start.sh ends with: fedsim is not installed here"
    (tmp_path / federation.wheel).write_bytes(b"")
    assert federation.clients("target") == ["rot75"]
    assert {kit.name for kit in init(federation)} == {"operator", "server", "alpha", "beta", "gamma"}
    assert all((federation.kit(site) / federation.wheel).is_file() for site in ("alpha", "beta", "gamma"))
    words = set(re.findall(r"`([a-z_.]+)`", PAGE)) | set(re.findall(r"^(\w+) =", example, re.MULTILINE))
    known = {*Federation.model_fields, *Site.model_fields} - {"sites"}
    assert {key for key in known if key not in words and f"sites.{key}" not in words} == set()


def test_commands_on_the_pages_exist():
    lines = [line for text in (PAGE, START) for block in blocks("bash", text) for line in block.splitlines()]
    lines = [line for line in lines if line.startswith(("fedsim deploy", "fedsim run"))]
    found = [shlex.split(line, comments=True) for line in lines]
    assert {("deploy", "init"), ("deploy", "check"), ("run", "digits")} <= {tuple(each[1:3]) for each in found}
    for each in found:
        command, rest = typer.main.get_command(app), each[1:]
        context = click.Context(command)
        while isinstance(command, click.Group):
            command = command.get_command(context, rest.pop(0))
            assert command is not None, each
        command.make_context(each[1], rest)
