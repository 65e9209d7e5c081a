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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield ray
        ray.shutdown()


def ray_grid(clients: int, **words: object) -> Iterator[object]:
    from fedsim.runtime.ray import RayGrid

    workers = {"workers": words.pop("workers")} if "workers" in words else {}
    grid = RayGrid(clients, RunSettings(threads=1, device="cpu", **workers), **words)
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def grid(ray_cluster: object) -> Iterator[object]:
    """Three clients of the real app on two workers."""
    yield from ray_grid(3)


@pytest.fixture(scope="module")
def probes(ray_cluster: object) -> Iterator[object]:
    """Three clients of the probe app on one worker, which is replaced after each test that kills it."""
    yield from ray_grid(3, workers=1, app="probe_app:app")
