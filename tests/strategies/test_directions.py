"""The servers of FedOMG, FedGaLA and FedDyn and the record of FedCM on numbers worked out by hand."""

from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest
from test_optimization_rules import replies, uniform

from fedsim.assembly import assemble, build_recipe, find_recipe
from fedsim.errors import UserError
from fedsim.experiment import Experiment
from fedsim.methods import METHODS
from fedsim.part import part_name
from fedsim.recipe import in_order
from strategies.banks.global_direction import GlobalDirection
from strategies.fuse.aligned_weights import AlignedWeights, alignment_weights
from strategies.fuse.gradient_matching import GradientMatching, gram
from strategies.fuse.weighted_mean import WeightedMean
from strategies.refine.dynamic_correction import DynamicCorrection

ORTHOGONAL, CONFLICTING = ((1, 0), (0, 1)), ((2, 0), (-1, 1))
THREE = ((1, 0, 0), (0, 1, 0), (-1, -1, 1))


def matched(deltas, **settings):
    """(Gamma, a, g) of FedOMG."""
    deltas = [{"w": np.array(delta, float)} for delta in deltas]
    gamma, a = GradientMatching(**settings).solve(gram(deltas))
    return gamma, a, sum(share * delta["w"] for share, delta in zip(a, deltas))


def close(found, expected, atol=1.5e-6):
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


def test_matching_of_orthogonal_moves():
    """Orthogonal moves count alike; the direction is 1.2 times as long as their mean, 1.5 times without rescaling."""
    gamma, _, g = matched(ORTHOGONAL)
    close(gamma, (0.5, 0.5))
    close(g, (0.599972, 0.599972))
    close(matched(ORTHOGONAL, solver="exact")[2], (0.6, 0.6))
    close(matched(ORTHOGONAL, solver="exact", rescale=False)[2], (0.75, 0.75))


def test_matching_of_conflicting_moves():
    """Of two moves there is no conflict any more; of three the smallest inner product rises from 0 to .085."""
    gamma, a, g = matched(CONFLICTING)
    close(gamma, (0.000064, 0.999936))
    close(a, (0.400013, 0.600032))
    close(g, (0.199993, 0.600032))
    close([g @ delta for delta in np.array(CONFLICTING)], (0.399987, 0.400039))
    gamma, _, g = matched(CONFLICTING, solver="exact")
    close(gamma, (0, 1), 1e-5)
    close(g, (0.2, 0.6), 1e-5)
    close(matched(CONFLICTING, solver="exact", rescale=False)[2], (0.25, 0.75), 1e-5)
    gamma, _, g = matched(THREE)
    close(gamma, (0.483622, 0.483622, 0.032757))
    close(g, (0.094186, 0.094186, 0.273510))
    gamma, _, g = matched(THREE, solver="exact")
    close(gamma, (0.468609, 0.468609, 0.062782), 2e-4)
    close(g, (0.093722, 0.093722, 0.281165), 2e-4)
    assert min(np.array(THREE) @ matched(THREE)[2]) == pytest.approx(0.085, abs=5e-4)


def test_matching_of_equal_moves_and_of_no_ball():
    """Equal moves have equal shares; c = 0 gives the mean."""
    gamma, _, g = matched([(1, 2)] * 3)
    close(gamma, (1 / 3,) * 3)
    close(g, (1.19996, 2.39992), 6e-6)
    close(matched([(1, 2)] * 3, solver="exact")[2], (1.2, 2.4), 1e-6)
    close(matched(CONFLICTING, c=0.0)[2], (0.5, 0.5))


def test_matching_keeps_order_and_scale():
    """Moves in another order have their shares in that order, longer ones a longer direction; the exact solver's value
    of the objective is the lowest."""
    gamma, _, _ = matched(THREE)
    turned, _, _ = matched([THREE[2], THREE[0], THREE[1]])
    close(turned, gamma[[2, 0, 1]], 1e-12)
    g, scaled = (
        matched([np.multiply(factor, delta) for delta in CONFLICTING], relative_eps=True)[2] for factor in (1, 7)
    )
    close(scaled, 7 * g, 1e-12)
    gamma, a, _ = matched([np.multiply(0.01, delta) for delta in CONFLICTING])
    close(gamma, (0.000788, 0.999212))
    close(a, (0.400158, 0.600189))
    for seed in range(20):
        deltas = np.random.default_rng(seed).normal(size=(4, 6))
        gram4, mean = deltas @ deltas.T, deltas.mean(0)

        def value(weights, deltas=deltas, mean=mean):
            direction = weights @ deltas
            return direction @ mean + 0.5 * np.linalg.norm(mean) * np.linalg.norm(direction)

        found = [GradientMatching(solver=solver).solve(gram4)[0] for solver in ("descent", "exact")]
        assert value(found[1]) <= value(found[0]) + 1e-9 <= value(np.full(4, 0.25)) + 1e-6


def test_matching_moves_parameters_and_averages_buffers(caplog):
    """Buffers are FedAvg's, or unchanged with `official`; one client gives FedAvg; short moves warn once."""
    updates, server = replies(*CONFLICTING, start=1.0)
    weights = {"a": 0.25, "b": 0.75}
    fused = GradientMatching().fuse(updates, weights, server)
    close(fused["w"], (1.199993, 1.600032))
    close(fused["mean"], [7.5])
    assert server.client_columns["b"]["weight"] == pytest.approx(0.600032, abs=1e-6)
    official = GradientMatching(variant="official").fuse(updates, weights, server)
    assert official["mean"].tolist() == [0.0]
    close(official["w"] - 1, 0.5 * matched([(0.5, 0), (-0.75, 0.75)])[2], 1e-6)
    alone, plain = (rule.fuse(updates[:1], {"a": 1.0}, server) for rule in (GradientMatching(), WeightedMean()))
    assert np.array_equal(alone["w"], plain["w"])
    short, server = replies((0.001, 0), (0, 0.001))
    for _ in range(2):
        GradientMatching().fuse(short, uniform(short), server)
    assert [record.message.count("relative_eps") for record in caplog.records] == [1]


def test_matching_of_moves_that_cancel():
    """The mean of the inner products is 0 but for rounding; no number of the result is NaN."""
    cancelling = np.array([[1.0, -1.0 - 1e-12], [-1.0 - 1e-12, 1.0]])
    for solver in ("descent", "exact"):
        assert np.isfinite(np.concatenate(GradientMatching(solver=solver).solve(cancelling))).all()
    with pytest.raises(UserError, match="c is 1; solver = 'exact' needs less"):
        GradientMatching(solver="exact", c=1.0).check(None)
    GradientMatching(solver="exact", c=0.99).check(None)
    GradientMatching(c=1.0).check(None)


def test_lengths_of_moves_are_their_own(caplog):
    """details.csv and the warning have the length of a move, also where a weight multiplies it."""
    updates, server = replies((0.06, 0), (0, 0.06))
    GradientMatching(scale="weights").fuse(updates, uniform(updates), server)
    lengths = [row["value"] for row in server.details if row["quantity"] == "move_length"]
    assert lengths == pytest.approx([0.06, 0.06])
    assert "moves are 0.06 long on average, and are multiplied" in caplog.text


def test_matching_refuses_weights_that_would_not_act():
    from fedsim.assembly import find_recipe

    with pytest.raises(UserError, match="gradient_matching does not use the clients' weights"):
        find_recipe("feddg-ga+fedomg")
    assert GradientMatching(scale="weights").uses_weights


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
    with pytest.raises(UserError, match="dynamic_correction adds to the mean of the clients' models"):
        find_recipe(pair)


@pytest.mark.parametrize("pair", ["fedig-a+feddyn", "feddyn+fedig-a"])
def test_dynamic_correction_refuses_adapters(pair):
    """A step of their own trains the adapters, in which no client pulls them back; FedIG without adapters is fine."""
    with pytest.raises(UserError, match=r"dynamic_correction adds .* adapters of mix_ig"):
        find_recipe(pair)
    find_recipe("fedig+feddyn")


@pytest.mark.parametrize(("pair", "words"), [
    ("feddyn+fedavgm", "dynamic_correction .* fed_avg_m would take for a new move"),
    ("fedadam+feddyn", "dynamic_correction .* fed_adam would take"),
    ("fedlesam-d+fedyogi", "dynamic_correction .* fed_yogi would take"),
    ("fedavgm+fedadam", "fed_adam and fed_avg_m are server optimizers"),
    ("fedcm+fedadam", "client_momentum .* fed_adam can make longer"),
    ("fedavgm+mofedsam", "client_momentum .* fed_avg_m can make longer"),
    ("fedcm+feddyn", "client_momentum .* dynamic_correction can make longer"),
    ("fedlesam-d+fedcm", "client_momentum .* dynamic_correction can make longer"),
    ("feddyn+mofedsam", "client_momentum .* dynamic_correction can make longer"),
    ("fedomg+fedcm", "client_momentum .* gradient_matching can make longer"),
    ("mofedsam+fedomg", "client_momentum .* gradient_matching can make longer"),
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
