"""DEPLOY.md: its federation is valid, its keys are all of them, its commands exist."""

import re
import shlex
from pathlib import Path

import click
import typer

import fedsim.deploy
from fedsim.commands.cli import app
from fedsim.deploy.federation import Federation, Site, read_federation
from fedsim.deploy.kits import init

PAGE = (Path(fedsim.deploy.__file__).parent / "DEPLOY.md").read_text()
START = (Path(__file__).parents[2] / "docs" / "start.md").read_text()


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
