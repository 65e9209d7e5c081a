"""Moves in half precision: two bytes a weight."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strategies.parts import ArrayDict, Arrays, Compress
from strategies.stored import Head


@dataclass(frozen=True)
class HalfPrecision(Compress):
    """h = float16(delta), the nearest number of half precision; the server reads h as delta.

        |h - delta| <= max(|delta| / 2^11, 1 / 2^25)

    Source: the format binary16 of IEEE 754. An update needs half of the bytes. It is the move that is rounded, and not
    the weight: the error is then a part of the step, and not a part of a weight that may be a thousand steps long. A
    move of more than 65504 has no number in this format, and such a reply is refused.
    """

    def form(self, heads: Mapping[str, Head]) -> dict[str, Head]:
        """The shapes of the moves, with values of half precision."""
        return {name: (shape, np.dtype(np.float16)) for name, (shape, _) in heads.items()}

    def encode(self, moves: Arrays, rng: np.random.Generator) -> ArrayDict:
        """The rounded moves; no draw is needed."""
        with np.errstate(over="ignore"):  # the server refuses what is infinite, and says which tensor
            return {name: move.astype(np.float16) for name, move in moves.items()}

    def decode(self, sent: Arrays, heads: Mapping[str, Head]) -> ArrayDict:
        """The rounded moves in the model's own type."""
        return {name: sent[name].astype(dtype) for name, (_, dtype) in heads.items()}
