"""Moves on a few levels, with stochastic rounding: a byte a weight, or less."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedsim.parts.facts import Fact
from strategies.parts import ArrayDict, Arrays, Compress
from strategies.stored import Head

RANGES = "quantized:ranges"  # offset and scale of every tensor, in the order of the names


@dataclass(frozen=True)
class Quantized(Compress):
    """q = floor((delta - a) / s + u), u uniform in [0, 1), and the server reads a + s q as delta.

        a = min delta,  s = (max delta - min delta) / (2^bits - 1)  for each tensor;  E[a + s q] = delta

    Source: stochastic rounding to uniform levels, as in QSGD (Alistarh et al., NeurIPS 2017). There the levels are for
    sizes from 0 to the norm of a vector, with a sign; ours lie between the least and the greatest move of a tensor,
    which is a smaller range. No value is off by more than s.
    On the wire are `bits` bits a weight, packed into bytes, and a and s as two numbers of eight bytes for each tensor.
    The draws come from the run's seed, the client and the round. It is the move that is rounded, and not the weight:
    the moves of a round span a far smaller range, and s is as much smaller.

    bits: of a weight; 2^bits levels
    """

    bits: Literal[2, 4, 8] = 8
    breaks = (Fact.STILL_ENTRIES,)

    def form(self, heads: Mapping[str, Head]) -> dict[str, Head]:
        """The packed levels of every tensor, and a record of offsets and scales."""
        packed = {}
        for name, (shape, _) in heads.items():
            packed[name] = ((math.ceil(math.prod(shape) * self.bits / 8),), np.dtype(np.uint8))
        return {**packed, RANGES: ((len(heads), 2), np.dtype(np.float64))}

    def encode(self, moves: Arrays, rng: np.random.Generator) -> ArrayDict:
        """The levels, drawn tensor by tensor in the order of the names."""
        sent: ArrayDict = {}
        ranges = np.zeros((len(moves), 2))
        for place, (name, move) in enumerate(moves.items()):
            values = move.astype(np.float64).reshape(-1)
            offset, scale = ranges[place] = self.range_of(values)
            sent[name] = self.packed(self.levels(values, offset, scale, rng))
        return {**sent, RANGES: ranges}

    def range_of(self, values: np.ndarray) -> tuple[float, float]:
        """(a, s) of one tensor; the scale is 0 where all values are equal."""
        if not values.size:
            return 0.0, 0.0
        least = float(values.min())
        return least, (float(values.max()) - least) / (2**self.bits - 1)

    def levels(self, values: np.ndarray, offset: float, scale: float, rng: np.random.Generator) -> np.ndarray:
        """q of every value, from 0 to 2^bits - 1, as whole numbers of one byte."""
        if not scale > 0 or not math.isfinite(scale):  # values that are not finite are refused by the server
            return np.zeros(values.shape, np.uint8)
        raised = (values - offset) / scale + rng.random(values.shape)
        return np.clip(np.floor(raised), 0, 2**self.bits - 1).astype(np.uint8)

    def packed(self, levels: np.ndarray) -> np.ndarray:
        """Levels in bytes, the first one in the lowest bits; the last byte is filled with zeros."""
        in_a_byte = 8 // self.bits
        filled = np.pad(levels, (0, -len(levels) % in_a_byte)).reshape(-1, in_a_byte)
        return np.bitwise_or.reduce(filled << self.shifts, axis=1)

    def unpacked(self, packed: np.ndarray, count: int) -> np.ndarray:
        """The first `count` levels of packed bytes."""
        levels = (packed[:, None] >> self.shifts) & np.uint8(2**self.bits - 1)
        return levels.reshape(-1)[:count]

    @property
    def shifts(self) -> np.ndarray:
        """The position in a byte of each of its levels."""
        return np.arange(0, 8, self.bits, dtype=np.uint8)

    def decode(self, sent: Arrays, heads: Mapping[str, Head]) -> ArrayDict:
        """a + s q of every tensor; ValueError for a negative scale."""
        if (sent[RANGES][:, 1] < 0).any():
            raise ValueError("a scale of its levels is negative")
        moves: ArrayDict = {}
        for (name, (shape, dtype)), (offset, scale) in zip(heads.items(), sent[RANGES], strict=True):
            levels = self.unpacked(sent[name], math.prod(shape))
            with np.errstate(over="ignore"):  # what is infinite is refused afterwards
                moves[name] = (offset + scale * levels).astype(dtype).reshape(shape)
        return moves
