"""The distribution's name is not that of another project; metadata, messages and pages use it everywhere."""

import re
import tomllib
from pathlib import Path

import fedsim
from fedsim.results.environment import environment

ROOT = Path(fedsim.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_project_is_called_as_the_program_says():
    assert PROJECT["name"] == fedsim.DISTRIBUTION != "fedsim"
    assert PROJECT["version"] == fedsim.__version__
    assert PROJECT["scripts"] == {"fedsim": "fedsim.commands.start:main"}
    assert environment()["packages"]["fedsim"] == fedsim.__version__


def test_every_extra_that_a_message_names_is_there():
    files = [file for package in ("fedsim", "clients", "strategies") for file in (ROOT / package).rglob("*.py")]
    named = {name for file in files for name in re.findall(r"\bextra\(['\"](\w+)['\"]\)", file.read_text())}
    assert {"ray", "tensorboard"} <= named <= set(PROJECT["optional-dependencies"])
    assert fedsim.extra("ray") == "pip install 'feddg-sim[ray]'"


def test_nobody_is_told_to_install_the_other_project():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "fedsim").rglob("*.md")]
    pages += [*(ROOT / "fedsim").rglob("*.py"), *(ROOT / "configs").rglob("*.toml")]
    wrong = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in pages
        for line in page.read_text().splitlines()
        if re.search(r"install ['\"]?fedsim\b(?!/)|fedsim\[\w+\]|fedsim-\*?\d*\.whl|fedsim-\*", line)
    ]
    assert wrong == []
