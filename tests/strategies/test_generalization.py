import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.methods.assembly import build_recipe
from fedsim.settings.experiment import Experiment
from strategies.weights.generalization_adjustment import VARIANTS, adjust_weights, step_size

THIRD = 1 / 3


def adjust(a, gaps, step, variant="centred", **options):
    clients = "ABCDEFGH"[: len(a)]
    result = adjust_weights(dict(zip(clients, a)), dict(zip(clients, gaps)), step, variant, **options)
    return [result[client] for client in clients]


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("centred", [0.158333, 0.333333, 0.508333]),
        ("paper", [0.158333, 0.333333, 0.508333]),
        ("official", [0.315476, 0.333333, 0.351190]),
    ],
)
def test_sixth_round_of_forty(variant, expected):
    step = step_size(0.2, 6, 40, variant)
    assert step == pytest.approx(0.18 if variant == "official" else 0.175)
    assert adjust([THIRD] * 3, [0.1, 0.2, 0.3], step, variant) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("variant", "expected"), [("centred", [0.158333, 0.420833, 0.420833]), ("paper", [0.0, 0.5, 0.5])]
)
def test_one_very_negative_gap(variant, expected):
    assert adjust([THIRD] * 3, [-1, 0.2, 0.2], 0.175, variant) == pytest.approx(expected, abs=1e-6)


def test_clipping_then_renormalising():
    assert adjust([0.1, 0.4, 0.5], [0.1, 0.2, 0.3], 0.175) == pytest.approx([0, 0.372093, 0.627907], abs=1e-6)


@pytest.mark.parametrize("gap", [0.1, 1e7, -3.0])
def test_equal_gaps_leave_centred_weights_and_draw_official_ones_to_uniform(gap):
    a = [0.5, 0.3, 0.2]
    assert adjust(a, [gap] * 3, 0.2) == a
    assert adjust(a, [gap] * 3, 0.2, "paper") == a
    if gap > 0:
        step = step_size(0.2, 2, 40, "official")
        assert adjust(a, [gap] * 3, step, "official") == pytest.approx([0.472222, 0.305556, 0.222222], abs=1e-6)


def test_official_accuracy_gap_counts_loss_of_accuracy():
    after_minus_before = [-0.1, 0, 0.05]
    step = step_size(0.2, 2, 40, "official")
    result = adjust([THIRD] * 3, [-gap for gap in after_minus_before], step, "official")
    assert result == pytest.approx([0.387097, 0.322581, 0.290323], abs=1e-6)


def test_partial_participation_keeps_the_mass_of_the_subset():
    result = adjust_weights({"A": 0.5, "B": 0.3, "C": 0.2}, {"A": 0.1, "B": 0.3}, 0.1)
    assert result == pytest.approx({"A": 0.4, "B": 0.4, "C": 0.2})
    assert result["C"] == 0.2
    assert result["A"] / (result["A"] + result["B"]) == pytest.approx(0.5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gaps", [[0, 0], [math.nan, 0.1], [math.nan, math.nan], [math.inf, 1.0]])
def test_no_usable_gaps_change_nothing(variant, gaps):
    assert adjust([0.7, 0.3], gaps, 0.2, variant) == [0.7, 0.3]


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_client_keeps_all_weight(variant):
    assert adjust_weights({"A": 1.0}, {"A": 0.4}, 0.2, variant) == {"A": 1.0}
    assert adjust_weights({"A": 1.0}, {}, 0.2, variant) == {"A": 1.0}


def test_clipping_everything_keeps_the_previous_weights():
    a = [0.05] * 20
    clients = [f"client{k}" for k in range(20)]
    result = adjust_weights(dict(zip(clients, a)), dict.fromkeys(clients, -0.3), 2.0, "official")
    assert list(result.values()) == a


def test_new_clients_enter_with_a_fair_share():
    result = adjust_weights({"A": 0.5, "B": 0.5}, {"C": math.nan}, 0.2)
    assert result == pytest.approx({"A": THIRD, "B": THIRD, "C": THIRD})
    assert adjust_weights({}, {"A": math.nan, "B": math.nan}, 0.2) == {"A": 0.5, "B": 0.5}
    moved = adjust_weights({"A": 0.5, "B": 0.5}, {"A": 0.1, "B": 0.2, "C": 0.3}, 0.1)
    assert moved == pytest.approx({"A": THIRD - 0.1, "B": THIRD, "C": THIRD + 0.1})


def test_a_client_at_zero_can_come_back_and_a_floor_keeps_it_in():
    assert adjust([0.0, 0.5, 0.5], [0.3, 0.1, 0.2], 0.1) == pytest.approx([0.1, 0.4, 0.5])
    floored = adjust([0.1, 0.4, 0.5], [0.1, 0.2, 0.3], 0.175, a_min=0.025)
    assert floored == pytest.approx([0.025 / 1.1, 0.4 / 1.1, 0.675 / 1.1])


def test_inputs_are_not_changed():
    weights, gaps = {"A": 0.5, "B": 0.5}, {"A": 0.1, "B": 0.3}
    adjust_weights(weights, gaps, 0.2)
    assert weights == {"A": 0.5, "B": 0.5}
    assert gaps == {"A": 0.1, "B": 0.3}


def test_schedule():
    assert step_size(0.2, 1, 40) == 0.2
    assert step_size(0.2, 40, 40) == pytest.approx(0.2 / 40)
    assert step_size(0.2, 1, 40, "official") == pytest.approx(0.205)
    assert step_size(0.2, 41 - 1, 40, "official") == pytest.approx(0.01)
    for call in (lambda: step_size(0.2, 0, 40), lambda: step_size(0.2, 41, 40)):
        with pytest.raises(ValueError, match="outside"):
            call()
    for call in (lambda: step_size(0.2, 1, 40, "x"), lambda: adjust([1.0], [1.0], 0.1, "x")):
        with pytest.raises(ValueError, match="unknown variant"):
            call()


GAPS = st.lists(st.integers(-1000, 1000).map(lambda g: g / 100), min_size=2, max_size=6)


@given(GAPS, st.floats(0.01, 0.5), st.sampled_from(VARIANTS), st.data())
def test_result_is_in_the_simplex_and_permutation_equivariant(gaps, step, variant, data):
    raw = data.draw(st.lists(st.floats(0.01, 1), min_size=len(gaps), max_size=len(gaps)))
    a = [value / sum(raw) for value in raw]
    result = adjust(a, gaps, step, variant)
    assert min(result) >= 0
    assert sum(result) == pytest.approx(1)
    order = data.draw(st.permutations(range(len(gaps))))
    shuffled = adjust([a[k] for k in order], [gaps[k] for k in order], step, variant)
    assert shuffled == pytest.approx([result[k] for k in order])


@given(GAPS, st.integers(-5, 5), st.sampled_from([0.1, 0.5, 3.0, 40.0]))
def test_centred_weights_ignore_shift_and_scale_of_the_gaps(gaps, shift, scale):
    a = [1 / len(gaps)] * len(gaps)
    moved = adjust(a, [scale * gap + shift for gap in gaps], 0.1)
    assert moved == pytest.approx(adjust(a, gaps, 0.1), abs=1e-9)
    assert max(abs(m - w) for m, w in zip(adjust(a, gaps, 0.5 / len(gaps)), a)) <= 0.5 / len(gaps) + 1e-12


def test_official_variant_measures_validation_accuracy():
    """The variant sets the released code's metric, unless the user sets another."""

    def metric(**method):
        recipe = build_recipe(Experiment(method={"name": "feddg-ga", **method}))
        return next(part.metric for part in recipe.reports)

    official = {"variant": "official"}
    assert metric() == "train_loss"
    assert metric(generalization_adjustment=official) == "validation_accuracy"
    own = metric(generalization_adjustment=official, generalization_gap={"metric": "train_loss"})
    assert own == "train_loss"
