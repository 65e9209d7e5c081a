"""Test settings: caches of the tests go to a temporary folder, never to the user's."""

import gc
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and PyTorch: two test processes share two cores

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEDSIM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_collection_finish() -> None:
    """Leave what the imports made out of garbage collection: parts of Flower collect after every record."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _open_log() -> None:
    """The project's log as at the start of a process: libraries that configure logging may have switched it off."""
    logging.disable(logging.NOTSET)
    logger = logging.getLogger("fedsim")
    logger.disabled, logger.propagate = False, True
    logger.setLevel(logging.NOTSET)
