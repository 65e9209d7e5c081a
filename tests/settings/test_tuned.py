"""The spaces that parts and [train] declare beside their defaults, from which a search draws."""

import dataclasses

import pytest

from fedsim.methods.part_settings import make, validated
from fedsim.methods.registry import parts_by_slot
from fedsim.settings import TrainSettings
from fedsim.settings.effect import marks
from fedsim.settings.experiment import parse_override
from fedsim.settings.tuned import Tuned, spaces
from fedsim.sweep.search import read_space

KINDS = dict.fromkeys(kind for kinds in parts_by_slot().values() for kind in kinds.values() if marks(kind, Tuned))


def ends_of(key, space):
    (knob,) = read_space([f"{key}={space.space}"])
    return [parse_override(f"{key}={text}")[1] for text in knob.ends]


def test_the_ends_of_every_declared_space_are_allowed():
    """A space is read like --space, and names where it comes from."""
    assert len(KINDS) > 30
    for kind in KINDS:
        for name, own in marks(kind, Tuned).items():
            for space in own:
                assert space.source
                for value in ends_of(f"method.part.{name}", space):
                    changed = validated(make(kind), {name: value}, "part")
                    assert getattr(changed, name) == pytest.approx(value)
    for name, own in marks(TrainSettings, Tuned).items():
        for value in (value for space in own for value in ends_of(f"train.{name}", space)):
            assert getattr(TrainSettings.model_validate({name: value}), name) == value


def test_a_space_belongs_to_values_of_other_settings():
    """Adam has another range of lr than SGD, and RSC's shares have an effect in one of its forms only."""
    sgd, adam = (spaces(TrainSettings(optimizer=name), {})["lr"].space for name in ("sgd", "adamw"))
    assert (sgd, adam) == ("log:0.001:0.1", "log:1e-5:3e-3")
    (kind,) = (kind for kind in KINDS if kind.__name__ == "SelfChallenging")
    assert list(spaces(kind(), {})) == ["f", "b"]
    assert spaces(dataclasses.replace(kind(), variant="official"), {}) == {}
