"""The space of a search: its draws, the arithmetic of scores and ranks, and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.common.errors import UserError
from fedsim.sweep.search import first_alike, nested, points, ranking, read_space, score

RATE = "train.lr=log:1e-4:1e-1"


def values(word, *shares):
    """The values of a space at some shares of it."""
    return [read_space([word])[0].value(share) for share in shares]


def test_values_by_hand():
    """A log range is uniform in the exponent, both ends of an int range are reached, and numbers have four digits."""
    assert values("train.lr=log:1e-4:1e-2", 0.0, 0.25, 0.5) == ["0.0001", "0.0003162", "0.001"]
    assert values("train.lr=uniform:0.1:0.3", 0.0, 0.5, 1 / 3) == ["0.1", "0.2", "0.1667"]
    assert values("train.batch_size=int:2:4", 0.0, 0.33, 0.34, 0.99) == ["2", "2", "3", "4"]
    assert values('method.add=["a","b"],[]', 0.0, 0.49, 0.5) == ['["a","b"]', '["a","b"]', "[]"]
    assert values("train.lr=uniform:0.123456:0.123457", 0.5) == ["0.123457"]  # rounding does not leave the range


@given(seed=st.integers(0, 2**31), trial=st.integers(1, 500), low=st.floats(1e-8, 1e3), factor=st.floats(1.001, 1e6))
def test_a_draw_is_in_its_range_and_has_four_digits(seed, trial, low, factor):
    """Whatever the range, except where an end itself has more digits."""
    for kind in ("log", "uniform"):
        (knob,) = read_space([f"train.lr={kind}:{low!r}:{low * factor!r}"])
        drawn = float(knob.draw(seed, trial))
        assert knob.low <= drawn <= knob.high
        assert drawn in (knob.low, knob.high, float(f"{drawn:.4g}"))


@given(seed=st.integers(0, 1000), trials=st.integers(2, 12), more=st.integers(1, 12))
def test_more_trials_and_more_settings_change_no_draw(seed, trials, more):
    """Each draw depends on the seed, the setting's own name and the trial's number alone."""
    words = ["train.momentum=uniform:0:0.9", RATE]
    few = points(read_space(words[1:]), trials, seed)
    many = points(read_space(words), trials + more, seed)
    assert many == points(read_space(words[::-1]), trials + more, seed)
    assert [point.get("train.lr") for point in many[:trials]] == [point.get("train.lr") for point in few]
    assert few[0] == many[0] == {}


def test_draws_differ_between_trials_settings_and_seeds():
    """Two settings with the same range have draws of their own."""
    knobs = read_space([RATE, "train.weight_decay=log:1e-4:1e-1"])
    first, second = points(knobs, 50, 0), points(knobs, 50, 1)
    drawn = [text for point in (*first[1:], *second[1:]) for text in point.values()]
    assert len(set(drawn)) > 150
    exponents = [math.log10(float(point["train.lr"])) for point in first[1:]]
    assert -2.8 < sum(exponents) / len(exponents) < -2.2  # the middle of the exponents is -2.5


def test_scores_and_ranks_by_hand():
    """A missing cell leaves no score; equal scores share a rank, and the first trial is listed first."""
    assert [score(own) for own in ([0.5, 0.75], [0.5, None], [])] == [0.625, None, None]
    assert ranking({0: 0.5, 1: None, 2: 0.75, 3: 0.5 + 1e-12, 4: 0.25}) == {2: 1, 0: 2, 3: 2, 4: 4}
    assert ranking({0: None}) == {}


def test_equal_values_are_one_trial_and_values_are_nested_for_toml():
    """Also where the file's own value is written in another way."""
    drawn = [{}, {"train.lr": "5e-2"}, {"train.lr": "0.1"}, {"train.lr": "0.10"}]
    assert first_alike(drawn, {"train.lr": 0.05}) == [0, 0, 2, 2]
    expected = {"train": {"lr": 0.1}, "method": {"guiding_head": {"weight": 1}}}
    assert nested({"train.lr": 0.1, "method.guiding_head.weight": 1}) == expected


@pytest.mark.parametrize(("space", "said"), [
    (["train.lr"], "is not of the form"),
    (["train.lr=log:0:1"], "must begin above 0"),
    (["train.lr=uniform:1:1"], "the range is empty"),
    (["train.lr=uniform:0.2:0.1"], "0.2 is not below 0.1"),
    (["train.lr=uniform:0.1"], "give two numbers"),
    (["train.lr=uniform:a:b"], "give two numbers"),
    (["train.lr=uniform:0:inf"], "must be finite"),
    (["train.batch_size=int:2:4.5"], "whole numbers"),
    (["train.lr=loguniform:1e-4:1"], "this is one value"),
    (["train.lr=0.1,,0.2"], "a value is empty"),
    (["train.lr=0.1,0.1"], "a value is given twice"),
    ([RATE, "train.lr=0.1,0.2"], "train.lr is given twice"),
    (["run.target=rot0,rot15"], "use --targets"),
    (["method.name=fedavg,csac"], "use --method"),
    (["run.select_on=aggregated,local"], "run.select_on is not searched"),
    (["data.fraction=uniform:0.1:1"], "[data] says what the task is"),
    (["train.evaluate_every=int:1:3"], "the validation by which the trials are scored"),
    (["lr=0.1,0.2"], "whole name"),
])  # fmt: skip
def test_a_space_is_refused_by_itself(space, said):
    with pytest.raises(UserError) as refused:
        read_space(space)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
