"""DEPLOY.md: its federation is valid, its keys are all of them, its commands exist."""

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

import fedsim.deploy
from fedsim.commands.cli import app
from fedsim.deploy.federation import Federation, Site, read_federation
from fedsim.deploy.kits import init

PAGE = (Path(fedsim.deploy.__file__).parent / "DEPLOY.md").read_text()
START = (Path(__file__).parents[2] / "docs" / "start.md").read_text()


def blocks(language: str, text: str = PAGE) -> list[str]:
    """The page's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> list[list[str]]:
    """The `fedsim deploy` and `fedsim run` commands of the page and of the start page, split into words."""
    lines = [line for text in (PAGE, START) for block in blocks("bash", text) for line in block.splitlines()]
    return [
        shlex.split(line, comments=True)
        for line in lines
        if line.startswith("fedsim deploy") or (line.startswith("fedsim run") and "federation" in line)
    ]


def test_the_federation_on_the_page_can_be_provisioned(tmp_path):
    """As it stands there, word for word; the sites then install fedsim from their kits, as the page says."""
    (example,) = blocks("toml")
    (tmp_path / "federation.toml").write_text(example)
    federation = read_federation(tmp_path / "federation.toml")
    assert federation.wheel, "without it a site's start.sh ends with: fedsim is not installed here"
    (tmp_path / federation.wheel).write_bytes(b"")
    assert federation.clients("target") == ["rot75"]
    written = init(federation)
    assert {kit.name for kit in written} == {"operator", "server", "alpha", "beta", "gamma"}
    assert {str(kit.parent.name) for kit in written} == {"demo-kits"}
    assert all((federation.kit(site) / federation.wheel).is_file() for site in ("alpha", "beta", "gamma"))


def test_the_page_names_every_key():
    """In the example or in the table of the other keys."""
    example = blocks("toml")[0]
    words = set(re.findall(r"`([a-z_.]+)`", PAGE)) | set(re.findall(r"^(\w+) =", example, re.MULTILINE))
    known = {*Federation.model_fields, *Site.model_fields} - {"sites"}
    assert {key for key in known if key not in words and f"sites.{key}" not in words} == set()


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_on_the_page_exist(words):
    """Verbs, arguments and options are those of the command line."""
    command = typer.main.get_command(app)
    rest = words[1:]
    context = click.Context(command)
    while isinstance(command, click.Group):
        command = command.get_command(context, rest.pop(0))
        assert command is not None, words
    command.make_context(words[1], rest)


def test_the_pages_commands_are_found():
    """The test above sees what it should."""
    verbs = {tuple(words[1:3]) for words in commands()}
    assert {("deploy", "init"), ("deploy", "check"), ("run", "digits")} <= verbs
