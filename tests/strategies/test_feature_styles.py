"""The bank of features' styles: pairs of clients, and what is refused."""

import numpy as np
import pytest

from strategies.banks.feature_styles import FeatureStyles, derangement
from strategies.parts import ServerRound

BANK = FeatureStyles()


def style(value, channels=3):
    return {"style": np.full((4, channels), value, np.float32)}


def round_of(*drawn, round=2):
    return ServerRound(round, 3, ["a", "b", "c", "d"], {}, drawn=list(drawn))


def test_a_derangement_leaves_nothing_in_place():
    """T7: in 1000 draws of three, each of the two derangements comes about as often."""
    rng = np.random.default_rng(0)
    drawn = [tuple(derangement(3, rng).tolist()) for _ in range(1000)]
    assert set(drawn) == {(1, 2, 0), (2, 0, 1)}
    assert 400 < drawn.count((1, 2, 0)) < 600
    assert derangement(2, rng).tolist() == [1, 0]


def test_every_style_goes_to_one_other_client():
    bank = {name: style(number + 1) for number, name in enumerate("abcd")}
    pairs = set()
    for number in range(1, 30):
        server = round_of("a", "b", "d", round=number)
        got = [int(BANK.hand_out(bank, name, server)["style"][0, 0]) for name in "abd"]
        assert sorted(got) == [1, 2, 4]
        assert all(own != other for own, other in zip([1, 2, 4], got, strict=True))
        pairs.add(tuple(got))
    assert len(pairs) == 2


def test_without_a_partner_or_its_style_nothing_is_sent():
    """T9: a client alone in a round; a partner that has not trained yet."""
    assert BANK.hand_out({"a": style(1), "b": style(2)}, "a", round_of("a")) == {}
    assert BANK.hand_out({"a": style(1)}, "a", round_of("a", "b")) == {}
    assert BANK.hand_out({}, "a", round_of("a", "b", "c")) == {}
    assert BANK.hand_out({"a": style(1), "b": style(2)}, "a", round_of("b", "c")) == {}


@pytest.mark.parametrize(("record", "reason"), [
    (style(1), ""),
    ({"style": np.concatenate([np.full((1, 3), -2), np.ones((3, 3))]).astype(np.float32)}, ""),
    (style(0), "a deviation is 0"),
    ({"style": np.ones((3, 3), np.float32)}, "has 3 rows, expected 4"),
    ({"style": np.ones((4, 3), np.float64)}, "float64"),
    ({"style": np.full((4, 3), np.nan, np.float32)}, "NaN"),
    ({"mean": np.ones((4, 3), np.float32)}, "expected ['style']"),
])  # fmt: skip
def test_contributions(record, reason):
    found = BANK.accept("a", record, round_of("a", "b"))
    assert reason in found
    assert bool(found) == bool(reason)
