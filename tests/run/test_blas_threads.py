"""`run.threads` counts for PyTorch and for NumPy, also while the network of a message is built."""

import numpy as np
import pytest
import torch
from support import small_experiment
from threadpoolctl import threadpool_info

from fedsim.run.plan import Plan, resolve
from fedsim.run.workspace import close_workspaces, set_threads, workspace


@pytest.fixture(autouse=True)
def as_before():
    before = torch.get_num_threads()
    yield
    set_threads(before)


@pytest.mark.parametrize("order", [(1,), (2, 1), (1, 2, 1)])
def test_one_thread_of_training_leaves_no_busy_thread_of_numpy(order):
    """The norm of every update is a product of long vectors, after which OpenBLAS's threads spin on their cores."""
    for threads in order:
        assert set_threads(threads) == threads
    np.ones(4) @ np.ones(4)  # the library is loaded
    assert torch.get_num_threads() == 1
    assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}


def test_the_network_of_a_message_is_built_with_the_threads_of_the_run(tmp_path, monkeypatch):
    """Flower's engine or a cluster may have started the process with others."""
    seen, build_net = [], Plan.build_net
    monkeypatch.setattr(Plan, "build_net", lambda plan: seen.append(torch.get_num_threads()) or build_net(plan))
    close_workspaces()
    torch.set_num_threads(2)
    workspace(resolve(small_experiment(tmp_path)).experiment.toml())
    close_workspaces()
    assert seen == [1]
