import math

import pytest

from fedsim.methods.assembly import build_recipe
from fedsim.settings.experiment import Experiment
from strategies.weights.generalization_adjustment import VARIANTS, adjust_weights, step_size

THIRD, OFFICIAL = 1 / 3, {"variant": "official"}


EQUAL, UNEVEN, RISING = [THIRD] * 3, [0.1, 0.4, 0.5], [0.1, 0.2, 0.3]
UNIFORM = step_size(0.2, 2, 40, "official")


@pytest.mark.parametrize(("variant", "step", "weights", "gaps", "options", "expected"), [
    # the sixth round of forty: 0.2 times 35/40, official 36/40
    ("centred", 0.175, EQUAL, RISING, {}, [0.158333, 0.333333, 0.508333]),
    ("paper", 0.175, EQUAL, RISING, {}, [0.158333, 0.333333, 0.508333]),
    ("official", 0.18, EQUAL, RISING, {}, [0.315476, 0.333333, 0.351190]),
    ("paper", 0.175, EQUAL, [-1, 0.2, 0.2], {}, [0.0, 0.5, 0.5]),  # one gap is very negative
    ("centred", 0.175, UNEVEN, RISING, {}, [0, 0.372093, 0.627907]),  # clipped, then renormalised
    ("centred", 0.175, UNEVEN, RISING, {"a_min": 0.025}, [0.025 / 1.1, 0.4 / 1.1, 0.675 / 1.1]),
    ("centred", 0.175, [0.0, 0.5, 0.5], [0.3, 0.1, 0.2], {}, [0.175, 0.325, 0.5]),  # who is at zero can come back
    # equal gaps leave centred weights and draw official ones to uniform
    *((variant, 0.2, UNEVEN, [gap] * 3, {}, UNEVEN) for variant in ("centred", "paper") for gap in (0.1, 1e7, -3.0)),
    *(("official", UNIFORM, [0.5, 0.3, 0.2], [gap] * 3, {}, [0.472222, 0.305556, 0.222222]) for gap in (0.1, 1e7)),
    *((variant, 0.2, [0.7, 0.3], gaps, {}, [0.7, 0.3]) for variant in VARIANTS  # no usable gaps
      for gaps in ([0, 0], [math.nan, 0.1], [math.nan, math.nan], [math.inf, 1.0])),
])  # fmt: skip
def test_weights_by_hand(variant, step, weights, gaps, options, expected):
    found = adjust_weights(dict(zip("ABC", weights)), dict(zip("ABC", gaps)), step, variant, **options)
    assert list(found.values()) == pytest.approx(expected, abs=1e-6)
    assert expected != weights or list(found.values()) == weights


@pytest.mark.parametrize(("weights", "gaps", "expected"), [
    # partial participation keeps the mass of the subset
    ({"A": 0.5, "B": 0.3, "C": 0.2}, {"A": 0.1, "B": 0.3}, {"A": 0.4, "B": 0.4, "C": 0.2}),
    # new clients enter with a fair share
    ({"A": 0.5, "B": 0.5}, {"C": math.nan}, {"A": THIRD, "B": THIRD, "C": THIRD}),
    ({}, {"A": math.nan, "B": math.nan}, {"A": 0.5, "B": 0.5}),
    ({"A": 0.5, "B": 0.5}, {"A": 0.1, "B": 0.2, "C": 0.3}, {"A": THIRD - 0.1, "B": THIRD, "C": THIRD + 0.1}),
])  # fmt: skip
def test_who_is_absent_or_new(weights, gaps, expected):
    assert adjust_weights(weights, gaps, 0.1) == pytest.approx(expected)


def test_schedule():
    assert [step_size(0.2, round, 40) for round in (1, 6, 40)] == pytest.approx([0.2, 0.175, 0.005])
    assert [step_size(0.2, round, 40, "official") for round in (1, 6, 40)] == pytest.approx([0.205, 0.18, 0.01])
    for round in (0, 41):
        with pytest.raises(ValueError, match="outside"):
            step_size(0.2, round, 40)
    with pytest.raises(ValueError, match="unknown variant"):
        adjust_weights({"A": 1.0}, {"A": 1.0}, 0.1, "x")


@pytest.mark.parametrize(("settings", "metric"), [
    ({}, "train_loss"),
    ({"generalization_adjustment": OFFICIAL}, "validation_accuracy"),
    ({"generalization_adjustment": OFFICIAL, "generalization_gap": {"metric": "train_loss"}}, "train_loss"),
])  # fmt: skip
def test_official_variant_measures_validation_accuracy_unless_it_is_told(settings, metric):
    (report,) = build_recipe(Experiment(method={"name": "feddg-ga", **settings})).reports
    assert report.metric == metric
