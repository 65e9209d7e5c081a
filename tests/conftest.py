"""Test settings: caches of the tests go to a temporary folder, never to the user's."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and PyTorch: two test processes share two cores

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEDSIM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
