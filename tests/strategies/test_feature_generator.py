"""The bank of FedADG's generator."""

import re

import numpy as np
import pytest

from strategies.banks.feature_generator import FeatureGenerator
from strategies.parts import SERVER, ServerRound

BANK = FeatureGenerator()


def generator(value, inputs=3, width=4, features=2):
    shapes = {
        "hidden.weight": (width, inputs),
        "hidden.bias": (width,),
        "out.weight": (features, width),
        "out.bias": (features,),
    }
    return {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}


def round_of(**changes):
    """A round with weights .25 and .75."""
    return ServerRound(2, 3, ["a", "b"], {}, weights={"a": 0.25, "b": 0.75}, feature_dim=2, **changes)


def test_weighted_mean():
    entries = {"a": generator(1), "b": generator(5)}
    bank = BANK.merge({}, entries, round_of())
    assert {float(value) for array in bank[SERVER].values() for value in array.ravel()} == {4.0}
    assert BANK.hand_out({}, "a", round_of()) == {}
    assert BANK.hand_out(bank, "a", round_of()) is BANK.hand_out(bank, "b", round_of())


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"out.weight": np.zeros((2, 4), np.float32)}, "it holds"),
        ({**generator(1), "discriminator": np.zeros(1)}, "it holds"),
        ({**generator(1), "out.bias": np.zeros(2)}, "float64"),
        ({**generator(1), "hidden.bias": np.zeros(5, np.float32)}, "do not fit"),
        (generator(1, features=3), "width 3"),
        ({**generator(1), "out.bias": np.array([1, np.nan], np.float32)}, "NaN"),
    ],
)
def test_what_is_refused(wrong, reason):
    assert BANK.accept("a", generator(1), round_of()) == ""
    assert re.search(reason, BANK.accept("a", wrong, round_of()))


def test_later_generators_are_like_the_first():
    server = round_of(banks={BANK.name: {SERVER: generator(1)}})
    assert BANK.accept("a", generator(2), server) == ""
    assert "hidden.weight" in BANK.accept("a", generator(2, inputs=9), server)
