"""The servers of FedGaLA and FedDyn and the record of FedCM on numbers worked out by hand."""

from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest
from test_optimization_rules import replies, uniform

from fedsim.common.errors import UserError
from fedsim.methods.assembly import assemble, build_recipe, find_recipe
from fedsim.methods.recipe import in_order
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name
from fedsim.settings.experiment import Experiment
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


def test_alignment_weights_are_shares_of_whoever_comes():
    """Five weights are positive with sum 1; they follow the order of the moves and not their common length."""
    vectors = np.random.default_rng(0).normal(size=(5, 30))
    weights = alignment_weights(vectors, 3, 0.0)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= 0).all()
    close(alignment_weights(vectors[::-1], 3, 0.0), weights[::-1], 1e-12)
    close(alignment_weights(7 * vectors, 3, 0.0), weights, 1e-12)


def test_aligned_model_and_its_buffers():
    """Equal moves and an opposite one give w = (.5, .5, 0) for the models 11, 11 and 9; the buffer is weighted by p."""
    updates, server = replies((1, 0), (1, 0), (-1, 0), start=10.0)
    fused = AlignedWeights().fuse(updates, {"a": 0.5, "b": 0.25, "c": 0.25}, server)
    close(fused["w"], (11, 10), 1e-5)
    close(fused["mean"], [7.5])


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


@pytest.mark.parametrize(
    "pair", ["feddyn+fedomg", "feddyn+krum", "feddyn+fedgma", "fednova+feddyn", "fedlesam-d+fedgala"]
)
def test_dynamic_correction_needs_the_mean(pair):
    """H is the sum of what the mean left out; with another fusion the same moves would count twice or not at all."""
    with pytest.raises(UserError, match="dynamic_correction assumes that the fused model is the weighted mean"):
        find_recipe(pair)


@pytest.mark.parametrize("pair", ["fedig-a+feddyn", "feddyn+fedig-a"])
def test_dynamic_correction_refuses_adapters(pair):
    """A step of their own trains the adapters, in which no client pulls them back; FedIG without adapters is fine."""
    with pytest.raises(UserError, match=r"dynamic_correction assumes that one step .* not hold with mix_ig"):
        find_recipe(pair)
    find_recipe("fedig+feddyn")


@pytest.mark.parametrize(("pair", "words"), [
    ("feddyn+fedavgm", "dynamic_correction and fed_avg_m cannot both change that"),
    ("fedadam+feddyn", "dynamic_correction and fed_adam cannot both"),
    ("fedlesam-d+fedyogi", "dynamic_correction and fed_yogi cannot both"),
    ("fedavgm+fedadam", "fed_adam and fed_avg_m cannot both change that"),
    ("fedcm+fedadam", "global_direction .* not hold with fed_adam"),
    ("fedavgm+mofedsam", "global_direction .* not hold with fed_avg_m"),
    ("fedcm+feddyn", "global_direction .* not hold with dynamic_correction"),
    ("fedlesam-d+fedcm", "global_direction .* not hold with dynamic_correction"),
    ("feddyn+mofedsam", "global_direction .* not hold with dynamic_correction"),
    ("fedomg+fedcm", "global_direction .* not hold with gradient_matching"),
    ("mofedsam+fedomg", "global_direction .* not hold with gradient_matching"),
])  # fmt: skip
def test_what_makes_moves_longer_stands_alone(pair, words):
    """FedDyn's H, FedCM's D and the moments of a second optimizer would grow without bound."""
    with pytest.raises(UserError, match=words):
        find_recipe(pair)


@pytest.mark.parametrize("method", [
    {"name": "feddyn", "add": ["server_step", "server_average"]},
    {"name": "fedcm", "add": ["server_step", "server_average"]},
    {"name": "scaffold+fedadam", "add": ["server_average"]},
])  # fmt: skip
def test_server_steps_and_averages_stay(method):
    names = [part_name(part) for part in build_recipe(Experiment(method=method)).refine]
    assert set(method["add"]) <= set(names)
    assert names == sorted(names, key=["dynamic_correction", "fed_adam", "server_step", "server_average"].index)


def test_terms_and_refining_parts_have_an_order():
    """The names of two rows may stand in any order; sums come before products, corrections before averages."""
    pairs = combinations([name for name, row in METHODS.items() if row.terms or row.refine], 2)
    for pair in pairs:
        recipes = []
        for names in (pair, pair[::-1]):
            with suppress(UserError):
                recipes.append(assemble({"name": "+".join(names)}, {}))
        if recipes:
            one, two = recipes
            assert (one.terms, one.refine) == (two.terms, two.refine), pair
    terms = assemble({"name": "fedgala+fedcm+scaffold+fedprox"}, {}).terms
    assert [part_name(term) for term in terms] == [
        "proximal", "drift_correction", "client_momentum", "gradient_alignment"
    ]  # fmt: skip
    for name in ("server_average", "server_step"):
        refine = assemble(
            {"name": "fedavg", "refine": [name, "ensemble_distillation", "dynamic_correction"]}, {}
        ).refine
        places = [part_name(part) for part in refine]
        assert places.index(name) == {"server_step": 1, "server_average": 2}[name]
        assert places[0] == "dynamic_correction"


def test_the_order_leaves_every_row_as_it_is():
    for name, row in METHODS.items():
        assert in_order(row) == row, name


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


def test_rows_name_what_they_add():
    assert METHODS["fedcm"].disclosure() != METHODS["fedsam"].disclosure()
