import math

import pytest

from fedsim.methods.assembly import build_recipe
from fedsim.settings.experiment import Experiment
from strategies.weights.generalization_adjustment import VARIANTS, adjust_weights, step_size

THIRD, OFFICIAL = 1 / 3, {"variant": "official"}


def adjust(a, gaps, step, variant="centred", **options):
    clients = "ABCDEFGH"[: len(a)]
    result = adjust_weights(dict(zip(clients, a)), dict(zip(clients, gaps)), step, variant, **options)
    return [result[client] for client in clients]


@pytest.mark.parametrize(("variant", "step", "expected", "negative"), [
    ("centred", 0.175, [0.158333, 0.333333, 0.508333], [0.158333, 0.420833, 0.420833]),
    ("paper", 0.175, [0.158333, 0.333333, 0.508333], [0.0, 0.5, 0.5]),
    ("official", 0.18, [0.315476, 0.333333, 0.351190], None),
])  # fmt: skip
def test_sixth_round_of_forty(variant, step, expected, negative):
    """Gaps .1, .2, .3; and -1, .2, .2, of which one is very negative."""
    assert step_size(0.2, 6, 40, variant) == pytest.approx(step)
    assert adjust([THIRD] * 3, [0.1, 0.2, 0.3], step, variant) == pytest.approx(expected, abs=1e-6)
    if negative:
        assert adjust([THIRD] * 3, [-1, 0.2, 0.2], 0.175, variant) == pytest.approx(negative, abs=1e-6)


@pytest.mark.parametrize(("weights", "gaps", "options", "expected"), [
    ([0.1, 0.4, 0.5], [0.1, 0.2, 0.3], {}, [0, 0.372093, 0.627907]),  # clipped, then renormalised
    ([0.1, 0.4, 0.5], [0.1, 0.2, 0.3], {"a_min": 0.025}, [0.025 / 1.1, 0.4 / 1.1, 0.675 / 1.1]),
    ([0.0, 0.5, 0.5], [0.3, 0.1, 0.2], {}, [0.175, 0.325, 0.5]),  # who is at zero can come back
])  # fmt: skip
def test_clipping(weights, gaps, options, expected):
    assert adjust(weights, gaps, 0.175, **options) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("gap", [0.1, 1e7, -3.0])
def test_equal_gaps_leave_centred_weights_and_draw_official_ones_to_uniform(gap):
    a = [0.5, 0.3, 0.2]
    assert adjust(a, [gap] * 3, 0.2) == a
    assert adjust(a, [gap] * 3, 0.2, "paper") == a
    if gap > 0:
        step = step_size(0.2, 2, 40, "official")
        assert adjust(a, [gap] * 3, step, "official") == pytest.approx([0.472222, 0.305556, 0.222222], abs=1e-6)


def test_partial_participation_keeps_the_mass_of_the_subset():
    result = adjust_weights({"A": 0.5, "B": 0.3, "C": 0.2}, {"A": 0.1, "B": 0.3}, 0.1)
    assert result == pytest.approx({"A": 0.4, "B": 0.4, "C": 0.2})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gaps", [[0, 0], [math.nan, 0.1], [math.nan, math.nan], [math.inf, 1.0]])
def test_no_usable_gaps_change_nothing(variant, gaps):
    assert adjust([0.7, 0.3], gaps, 0.2, variant) == [0.7, 0.3]


def test_new_clients_enter_with_a_fair_share():
    result = adjust_weights({"A": 0.5, "B": 0.5}, {"C": math.nan}, 0.2)
    assert result == pytest.approx({"A": THIRD, "B": THIRD, "C": THIRD})
    assert adjust_weights({}, {"A": math.nan, "B": math.nan}, 0.2) == {"A": 0.5, "B": 0.5}
    moved = adjust_weights({"A": 0.5, "B": 0.5}, {"A": 0.1, "B": 0.2, "C": 0.3}, 0.1)
    assert moved == pytest.approx({"A": THIRD - 0.1, "B": THIRD, "C": THIRD + 0.1})


def test_schedule():
    assert [step_size(0.2, round, 40) for round in (1, 40)] == [0.2, pytest.approx(0.005)]
    assert [step_size(0.2, round, 40, "official") for round in (1, 40)] == pytest.approx([0.205, 0.01])
    for round in (0, 41):
        with pytest.raises(ValueError, match="outside"):
            step_size(0.2, round, 40)
    with pytest.raises(ValueError, match="unknown variant"):
        adjust([1.0], [1.0], 0.1, "x")


@pytest.mark.parametrize(("settings", "metric"), [
    ({}, "train_loss"),
    ({"generalization_adjustment": OFFICIAL}, "validation_accuracy"),
    ({"generalization_adjustment": OFFICIAL, "generalization_gap": {"metric": "train_loss"}}, "train_loss"),
])  # fmt: skip
def test_official_variant_measures_validation_accuracy_unless_it_is_told(settings, metric):
    (report,) = build_recipe(Experiment(method={"name": "feddg-ga", **settings})).reports
    assert report.metric == metric
