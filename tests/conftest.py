"""Settings of all tests: their caches are in a temporary folder, never in the user's."""

import atexit
import gc
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and PyTorch: two test processes share two cores
# This process and every command that a test starts would otherwise compile all sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import settings

settings.register_profile("fedsim", deadline=None)  # a busy machine is no fault
settings.load_profile("fedsim")
sys.dont_write_bytecode = False
sys.path.insert(0, str(Path(__file__).parent))
pytest_plugins = ["image_trees"]  # fixtures of several folders
gc.disable()  # until all tests are imported: nothing of what imports make is garbage, and each search takes longer
# A process of xdist ends without freeing its objects one by one, which takes seconds; its exit code is not read. Others
# do: of objects that stay frozen triton would name thousands as leaked.
atexit.register(*((os._exit, 0) if "PYTEST_XDIST_WORKER" in os.environ else (gc.unfreeze,)))


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEDSIM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_collection_finish() -> None:
    """Exclude the objects of imported modules from garbage collection, which Flower starts after every record."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _open_log() -> None:
    """Restore the project's log, because libraries that configure logging may have disabled it."""
    logging.disable(logging.NOTSET)
    logger = logging.getLogger("fedsim")
    logger.disabled, logger.propagate = False, True
    logger.setLevel(logging.NOTSET)
