"""How many workers a cluster has room for, and the messages when it has no room or Ray is missing."""

import os
import sys
from types import SimpleNamespace

import pytest

from fedsim.common.errors import UserError
from fedsim.runtime import cluster
from fedsim.settings import RunSettings


@pytest.fixture
def planned(monkeypatch):
    """planned(settings, resources): the workers for five clients, as if Ray had these machines and one that is off."""

    def plan(settings, *resources):
        nodes = [{"Alive": True, "Resources": each} for each in resources]
        nodes.append({"Alive": False, "Resources": {"CPU": 100.0}})
        monkeypatch.setattr(cluster, "import_ray", lambda: SimpleNamespace(nodes=lambda: nodes))
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        return cluster.plan_workers(RunSettings(**settings), clients=5)

    return plan


@pytest.mark.parametrize(("settings", "resources", "workers", "gpus"), [
    ({}, [{"CPU": 8.0}], 5, 0.0),  # one per client at most
    ({}, [{"CPU": 2.0}], 2, 0.0),
    ({"cpus_per_worker": 2.0}, [{"CPU": 3.0}, {"CPU": 5.0}], 3, 0.0),  # whole workers per machine
    ({"workers": 2}, [{"CPU": 8.0}], 2, 0.0),
    ({"ray_address": "somewhere", "workers": 2}, [{"CPU": 8.0}], 2, 0.0),  # only what is reserved
    ({"cpus_per_worker": 0.5}, [{"CPU": 1.0}], 2, 0.0),
    ({"gpus_per_worker": 0.25}, [{"CPU": 8.0, "GPU": 1.0}], 4, 0.25),
    ({"gpus_per_worker": 0.6}, [{"CPU": 8.0, "GPU": 2.0}], 2, 0.6),  # a fraction does not span two GPUs
    ({}, [{"CPU": 8.0, "GPU": 1.0}], 5, 0.2),  # without a wish the GPUs are shared
    ({}, [{"CPU": 8.0, "GPU": 2.0}], 5, 0.3333),
    ({"device": "cpu"}, [{"CPU": 8.0, "GPU": 1.0}], 5, 0.0),
])  # fmt: skip
def test_workers_fill_the_cluster(planned, settings, resources, workers, gpus):
    plan = planned(settings, *resources)
    assert (plan.workers, plan.gpus) == (workers, gpus)


@pytest.mark.parametrize(("settings", "said"), [
    ({"cpus_per_worker": 16.0}, "has room for 0 workers of 16 CPUs"),
    ({"ray_address": "somewhere", "workers": 5, "cpus_per_worker": 4.0}, "has room for 2 workers of 4 CPUs"),
    ({"device": "cuda"}, "no GPU"),
    ({"gpus_per_worker": 0.5}, "has room for 0 workers"),
])  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_starts(planned, settings, said):
    with pytest.raises(UserError, match=said):
        planned(settings, {"CPU": 8.0})


def test_without_ray_the_user_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install .feddg-sim\[ray\]"):
        cluster.import_ray()
