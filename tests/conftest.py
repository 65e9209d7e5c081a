"""Test settings: caches of the tests go to a temporary folder, never to the user's."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    import os

    os.environ["FEDSIM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
