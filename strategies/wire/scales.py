"""How sums of features and the scale that is made of them travel in configs; see fedsim/data/scaling.py."""

from collections.abc import Mapping
from typing import TypeVar

from fedsim.common.values import Json
from fedsim.data.scaling import Moments, Scale
from fedsim.tensors.records import Config

N = TypeVar("N", int, float)
Answer = Mapping[str, Json]  # the config with which a client answers in the handshake


def moments_config(moments: Moments) -> Config:
    """What the answer of a client in the handshake says of its training rows."""
    return {
        "scale-counts": list(moments.counts),
        "scale-sums": list(moments.sums),
        "scale-squares": list(moments.squares),
    }


def read_moments(answer: Answer) -> Moments | None:
    """The sums in a client's answer; None without any. ValueError for numbers that cannot be sums."""
    if "scale-counts" not in answer:
        return None
    counts = _numbers(answer.get("scale-counts"), int)
    sums = _numbers(answer.get("scale-sums"), float)
    squares = _numbers(answer.get("scale-squares"), float)
    moments = Moments(counts, sums, squares)
    if not moments.is_valid:
        raise ValueError("its sums of features contradict each other, or are not finite")
    return moments


def _numbers(values: Json, kind: type[N]) -> tuple[N, ...]:
    """A list of numbers of one type; ValueError for anything else."""
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ValueError("its sums of features are not numbers")
    return tuple(values)


def scale_config(scale: Scale) -> Config:
    """What every message after the handshake says of the scale."""
    return {"scale-mean": list(scale.mean), "scale-std": list(scale.std)}


def scale_in(config: Mapping[str, Json]) -> Scale | None:
    """The scale that a message brings; None for one without."""
    if "scale-mean" not in config:
        return None
    return Scale(tuple(config["scale-mean"]), tuple(config["scale-std"]))
