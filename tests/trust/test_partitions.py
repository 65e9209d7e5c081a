"""A partition is drawn once, and a partition that cannot be drawn is refused before anything starts."""

import time

import numpy as np
import pytest

from fedsim.common.errors import UserError
from fedsim.data import check_partitions, client_names, load_client, splits
from fedsim.runtime import launch
from fedsim.settings import DataSettings
from fedsim.settings.experiment import read_experiment


def test_the_clients_of_a_domain_share_one_draw(monkeypatch):
    """All domains of digits show the same images, and so share one partition too."""
    draws, original = [], splits.dirichlet_partition
    monkeypatch.setattr("fedsim.data.loading.dirichlet_partition", lambda *own: draws.append(own) or original(*own))
    data = DataSettings(dataset="digits", image_size=8, clients_per_domain=12, partition="dirichlet", split_seed=991)
    check_partitions(data, "rot75")
    for client in client_names(data, "rot75")[:3]:
        load_client(data, client)
    assert len(draws) == 1


def test_a_partition_that_cannot_be_drawn_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "make_grid", lambda plan: pytest.fail("a grid was made"))
    words = ["data.clients_per_domain=60", "data.partition=dirichlet", "data.alpha=0.1", f"run.output={tmp_path}"]
    started = time.process_time()
    with pytest.raises(UserError, match=r"data.alpha = 0.1 leaves one of 60 clients with fewer than 3 of 1000 images"):
        launch.launch(read_experiment("digits", words))
    assert time.process_time() - started < 5  # once 298 s
    assert not list(tmp_path.iterdir())


def test_shares_follow_dirichlets_moments():
    """E q = 1/K and Var q = (1/K)(1 - 1/K) / (K alpha + 1), for K = 4 and alpha = 0.5: 0.25 and 0.0625."""
    labels = np.repeat(np.arange(10), 500)
    parts = [splits.dirichlet_partition(labels, 4, 0.5, seed) for seed in range(60)]
    shares = np.array([np.bincount(labels[part], minlength=10) / 500 for drawn in parts for part in drawn])
    assert shares.mean() == pytest.approx(0.25)
    assert shares.var() == pytest.approx(0.0625, rel=0.1)
