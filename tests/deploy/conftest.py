"""The demo federation with and without kits. Its keys are made once."""

import shutil
from pathlib import Path

import pytest
from demo import TOML

from fedsim.deploy.federation import Federation, read_federation
from fedsim.deploy.kits import init


@pytest.fixture
def federation_file(tmp_path: Path) -> Path:
    """The file, alone in a folder."""
    (tmp_path / "federation.toml").write_text(TOML)
    return tmp_path / "federation.toml"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits that nobody changes."""
    file = tmp_path_factory.mktemp("made") / "federation.toml"
    file.write_text(TOML)
    init(read_federation(file))
    return file.parent / "demo-kits"


@pytest.fixture
def federation(federation_file: Path, made: Path) -> Federation:
    """The federation with a copy of these kits."""
    shutil.copytree(made, federation_file.parent / "demo-kits")
    return read_federation(federation_file)
