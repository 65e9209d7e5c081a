"""`run.threads` counts for PyTorch and for NumPy."""

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from fedsim.run.workspace import set_threads


def blas_threads() -> set[int]:
    np.ones(4) @ np.ones(4)  # the library is loaded
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


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
    assert torch.get_num_threads() == 1
    assert blas_threads() == {1}
