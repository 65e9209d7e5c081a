"""The servers of FedGaLA and FedDyn and the record of FedCM on numbers worked out by hand."""

from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest
from test_optimization_rules import replies, uniform

from fedsim.common.errors import UserError
from fedsim.methods.assembly import assemble, find_recipe
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name
from strategies.banks.global_direction import GlobalDirection
from strategies.fuse.aligned_weights import AlignedWeights, alignment_weights
from strategies.fuse.weighted_mean import WeightedMean
from strategies.refine.dynamic_correction import DynamicCorrection


def close(found, expected, atol=1.5e-6):
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("vectors", "settings", "expected"),
    [
        (((1, 0), (0, 1), (1, 1)), (3, 0.0), (0.315301, 0.315301, 0.369398)),
        (((1, 0), (0, 1), (1, 1)), (3, 0.25), (0.319809, 0.319809, 0.360382)),
        (((1, 0), (1, 0), (-1, 0)), (3, 0.0), (0.5, 0.5, 0.0)),
        (((0.5, 0), (0, 0.3), (0.2, 0.2)), (3, 0.0), (0.342162, 0.288857, 0.368981)),
        (((0, 0), (0, 0), (0, 0)), (3, 0.0), (1 / 3, 1 / 3, 1 / 3)),
        (((1, 0), (0, 1), (1, 1)), (3, 1.0), (1 / 3, 1 / 3, 1 / 3)),
    ],
)
def test_alignment_weights_by_hand(vectors, settings, expected):
    """Softmax of the summed alignments: three moves, with gamma > 0, an opposite one, unequal lengths, no length;
    gamma = 1 gives equal weights."""
    close(alignment_weights(np.array(vectors, float), *settings), expected, 1e-6)


def test_aligned_model_and_its_buffers():
    """Equal moves and an opposite one give w = (.5, .5, 0) for the models 11, 11 and 9; the buffer is weighted by p."""
    updates, server = replies((1, 0), (1, 0), (-1, 0), start=10.0)
    fused = AlignedWeights().fuse(updates, {"a": 0.5, "b": 0.25, "c": 0.25}, server)
    close(fused["w"], (11, 10), 1e-5)
    close(fused["mean"], [7.5])
    updates, server = replies((1, 0), (0, 1), (1, 1))  # the shares act on the common direction, not on the models
    weights = AlignedWeights(n_it=1).fuse(updates, {"a": 0.5, "b": 0.25, "c": 0.25}, server)["w"]
    expected = alignment_weights(np.array([(0.5, 0), (0, 0.25), (0.25, 0.25)]), 1, 0.0)
    close(weights, expected @ np.array([(1, 0), (0, 1), (1, 1)]))


def test_dynamic_correction_counts_all_clients():
    """The server in the first two rounds: theta is 2, then 2.9; with one of two replies H changes half as much."""
    updates, server = replies((0.5,), (1.5,))
    fused = WeightedMean().fuse(updates, uniform(updates), server)
    assert DynamicCorrection().refine(fused, server)["w"].item() == 2.0
    second, after = replies((-0.525,), (0.425,), start=2.0)
    after.arrays = server.arrays
    fused = WeightedMean().fuse(second, uniform(second), after)
    assert DynamicCorrection().refine(fused, after)["w"].item() == pytest.approx(2.9)
    assert DynamicCorrection().refine(fused, after)["mean"].item() == 5.0
    partial, alone = replies((0.5,), (1.5,))
    alone.updates = partial[:1]
    assert DynamicCorrection().refine({"w": np.array([0.5], np.float32)}, alone)["w"].item() == 0.75


@pytest.mark.parametrize(("pair", "words"), [
    ("feddyn+fedomg", "dynamic_correction assumes that the fused model is the weighted mean"),
    ("fedig-a+feddyn", r"dynamic_correction assumes that one step .* not hold with mix_ig"),
    ("feddyn+fedavgm", "dynamic_correction and fed_avg_m cannot both change that"),
    ("fedavgm+fedadam", "fed_adam and fed_avg_m cannot both change that"),
    ("fedcm+fedadam", "global_direction .* not hold with fed_adam"),
    ("fedcm+feddyn", "global_direction .* not hold with dynamic_correction"),
    ("fedomg+fedcm", "global_direction .* not hold with gradient_matching"),
])  # fmt: skip
def test_what_makes_moves_longer_stands_alone(pair, words):
    """FedDyn's H, FedCM's D and the moments of a second optimizer would grow without bound."""
    with pytest.raises(UserError, match=words):
        find_recipe(pair)


def test_terms_and_refining_parts_have_an_order():
    """The names of two rows may stand in any order; sums come before products, corrections before averages."""
    for pair in combinations([name for name, row in METHODS.items() if row.terms or row.refine], 2):
        with suppress(UserError):
            one, two = (assemble({"name": "+".join(names)}, {}) for names in (pair, pair[::-1]))
            assert (one.terms, one.refine) == (two.terms, two.refine), pair
    terms = assemble({"name": "fedgala+fedcm+scaffold+fedprox"}, {}).terms
    assert list(map(part_name, terms)) == ["proximal", "drift_correction", "client_momentum", "gradient_alignment"]
    refine = assemble({"name": "scaffold+fedadam", "add": ["server_average", "server_step"]}, {}).refine
    assert list(map(part_name, refine)) == ["fed_adam", "server_step", "server_average"]


def test_direction_is_the_last_move_per_gradient():
    """theta moved by -6 in 4 gradients at rate .5 (client a) and 2 at rate 1 (b): D = 6 / 2; no D without a move."""
    metrics = [{"gradient_count": 4, "learning_rate": 0.5}, {"gradient_count": 2, "learning_rate": 1.0}]
    updates, server = replies((-6,), (-6,), metrics=metrics)
    server.weights, server.updates = uniform(updates), updates
    server.current = {"w": np.array([-6.0], np.float32), "mean": np.ones(1, np.float32)}
    made = GlobalDirection().make(server)
    assert {name: array.tolist() for name, array in made.items()} == {"w": [3.0]}
    server.updates = []
    assert GlobalDirection().make(server) == {}
