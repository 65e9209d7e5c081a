"""A local Ray cluster for all tests of a session, and grids that use it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsim.settings import RunSettings


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[object]:
    """Ray with two CPUs whose workers find the probe app."""
    pytest.importorskip("ray")
    from fedsim.runtime.cluster import import_ray

    ray = import_ray()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def grid(ray_cluster: object) -> Iterator[object]:
    """Three clients of the real app on two workers."""
    from fedsim.runtime.ray import RayGrid

    grid = RayGrid(3, RunSettings(threads=1, device="cpu"))
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def probes(ray_cluster: object) -> Iterator[object]:
    """Three clients of the probe app on one worker, which is replaced after each test that kills it."""
    from fedsim.runtime.ray import RayGrid

    grid = RayGrid(3, RunSettings(threads=1, device="cpu", workers=1), app="probe_app:app")
    yield grid
    grid.close()
