"""What a run sets for its whole process: its threads, on which its numbers depend, and the memory that it keeps."""

import json
import os
import resource
import sys
from math import inf

import numpy as np
import pytest
import torch
from support import Interrupt, run_small, small_experiment
from threadpoolctl import threadpool_info

from fedsim.commands.runs import run_one
from fedsim.common import cores
from fedsim.common.errors import UserError
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import Workspace, set_threads
from fedsim.settings.experiment import parse_experiment


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    set_threads(before)


def test_the_threads_of_the_settings_are_taken_whatever_the_process_had(tmp_path):
    """In Flower's engine or on a cluster, the process of a client may have another number of threads before."""
    seen = []

    class Meddler(Interrupt):
        def on_start(self, experiment, folder):
            torch.set_num_threads(2)

        def on_round(self, row, clients):
            seen.append(torch.get_num_threads())

    experiment = small_experiment(tmp_path, train={"rounds": 1})
    folder, _ = run_small(experiment, Meddler(0))
    recorded = json.loads((folder / "environment.json").read_text())
    assert (seen[-1], recorded["threads"], recorded["cores_free"]) == (1, 1, cores.free_cores())
    with pytest.raises(UserError, match=r"other settings \(run\.threads\)"):
        run_one(experiment.replace(run={"threads": 2}))


def test_all_free_cores_become_a_number_that_is_recorded(tmp_path, monkeypatch):
    """In a deployment every site has its own."""
    monkeypatch.setattr("fedsim.runs.plan.free_cores", lambda: 3)
    for runtime, threads in (("inline", 3), ("ray", 1), ("deployment", 0)):
        plan = resolve(small_experiment(tmp_path, run={"threads": 0, "runtime": runtime}))
        assert parse_experiment(plan.experiment.toml()).run.threads == threads


@pytest.mark.parametrize(("files", "granted"), [
    ({"proc": "0::/app\n", "app/cpu.max": "max 100000\n", "cpu.max": "200000 100000\n"}, 2.0),  # a parent's limit
    ({"proc": "0::/\n", "cpu.max": "max 100000\n"}, inf), ({"proc": "0::/gone\n"}, inf), ({}, inf),
    ({"proc": "4:cpu,cpuacct:/x\n", "cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, 0.5),
])  # fmt: skip
def test_quotas_of_control_groups(files, granted, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.quota(tmp_path / "proc", tmp_path) == granted


@pytest.mark.parametrize(("granted", "free"), [(inf, 4), (2.5, 2), (0.5, 1), (16.0, 4)])
def test_free_cores_are_the_least_of_affinity_and_quota(granted, free, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(cores, "quota", lambda: granted)
    assert cores.free_cores() == free


@pytest.mark.parametrize("order", [(1,), (2, 1), (1, 2, 1)])
def test_one_thread_of_training_leaves_no_busy_thread_of_numpy(order):
    """The norm of every update is a product of long vectors, after which OpenBLAS's threads spin on their cores."""
    for threads in order:
        assert set_threads(threads) == threads
    np.ones(4) @ np.ones(4)  # the library is loaded
    assert torch.get_num_threads() == 1
    assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_a_large_tensor_gets_the_memory_of_the_one_before(tmp_path):
    """Otherwise the system clears all of its pages again, which takes longer than the work on them."""
    Workspace(resolve(small_experiment(tmp_path)))
    faults = []
    for _ in range(4):
        torch.zeros(2**24)  # 64 MiB, 16,384 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    assert faults[-1] - faults[-2] < 1000
