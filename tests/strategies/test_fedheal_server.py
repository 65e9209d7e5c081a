"""FedHEAL on numbers worked out by hand: the weights and the fusion of the server."""

import numpy as np
import pytest
from replies import replies, uniform

from strategies.fuse.masked_mean import MaskedMean
from strategies.weights.domain_diversity import DomainDiversity


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


def test_weights_of_domain_diversity():
    """d = (1, 2, 5): D = .4 d / 8, w = (1/3 + .05, 1/3 + .1, 1/3 + .25) / 1.4. Then (2, 2, 4): D = .6 D + .4 d / 8."""
    part = DomainDiversity()
    updates, server = replies((1, 0), (0, -2), (3, 4))
    close(list(part.weigh(updates, server).values()), (0.273810, 0.309524, 0.416667))
    later, server_later = replies((2, 0), (2, 0), (4, 0))
    server_later.state = server.state
    close(list(part.weigh(later, server_later).values()), np.array((0.51333333, 0.59333333, 0.93333333)) / 2.04)
    close(list(server.state["change"].values()), (0.13, 0.16, 0.35))
    absent, server_absent = replies((1, 0), (1, 0), (1, 0))
    server_absent.state = server.state
    found = part.weigh(absent[:2], server_absent)
    assert found.keys() == {"a", "b"}
    close(server.state["w"]["c"], 0.93333333)
    close(sum(found.values()), 1)


def test_lengths_are_sums_of_norms_and_no_move_changes_nothing():
    part = DomainDiversity(beta=1.0)
    updates, server = replies((0,), (0,))
    assert part.weigh(updates, server) == {"a": 0.5, "b": 0.5}
    assert part.weigh(*replies((3,), (1,))) == {"a": pytest.approx(1.25 / 2), "b": pytest.approx(0.75 / 2)}
    first, second = (
        {name: np.float32(each) for name, each in zip("xy", row)} for row in (((3, 0), (4,)), ((0, 1), (0,)))
    )
    updates, server = replies((0,), (0,))
    for update, arrays in zip(updates, (first, second)):
        update.arrays = arrays
    server.previous, server.parameters = {name: np.zeros_like(value) for name, value in first.items()}, frozenset("xy")
    close(list(part.weigh(updates, server).values()), (0.5 + 7 / 8, 0.5 + 1 / 8) / np.array(2.0))  # 3 + 4, and 1


def test_the_mean_of_those_who_moved():
    """w = (.5, .3, .2), masks (1, 0, 1), u = (1, ., 3): the step is (.5 + .6) / .7. Nobody moved the last one."""
    updates, server = replies((-1, 1, 0), (0, 1, 0), (-3, 1, 0), start=4.0)
    fused = MaskedMean().fuse(updates, {"a": 0.5, "b": 0.3, "c": 0.2}, server)
    close(fused["w"], (4 - 1.5714285714, 5, 4))
    close(fused["mean"], [(0.3 * 10 + 0.2 * 20) / 0.5])  # a's running mean did not move
    assert fused["count"] == 3
    assert fused["w"].dtype == np.float32
    updates, server = replies((1, 2), (3, 4), means=lambda k: 10 * (k + 1))
    fused = MaskedMean().fuse(updates, uniform(updates), server)
    close((*fused["w"], *fused["mean"]), (2, 3, 15))  # FedAvg
