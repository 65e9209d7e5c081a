"""A small federation file: three source sites and one target site on this machine."""

from pathlib import Path

import pytest

from fedsim.deploy.federation import Federation, read_federation
from fedsim.deploy.kits import init

TOML = """
name = "demo"
address = "127.0.0.1"
names = ["fl.example.org", "10.1.2.3"]

[[sites]]
name = "alpha"
domain = "rot0"

[[sites]]
name = "beta"
domain = "rot15"
port = 9095
data_dir = "/data/of beta"

[[sites]]
name = "gamma"
domain = "rot30"
port = 9096

[[sites]]
name = "delta"
domain = "rot45"
role = "target"
port = 9097
"""


@pytest.fixture
def federation_file(tmp_path: Path) -> Path:
    """The file, alone in a folder."""
    file = tmp_path / "federation.toml"
    file.write_text(TOML)
    return file


@pytest.fixture
def federation(federation_file: Path) -> Federation:
    """A federation with its kits."""
    federation = read_federation(federation_file)
    init(federation)
    return federation
