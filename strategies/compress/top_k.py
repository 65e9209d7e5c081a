"""The largest moves alone; what was left out is added to the moves of the next round."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from fedsim.parts.facts import BOTH, Fact
from fedsim.parts.part import RecipeParts, part_name
from strategies.parts import ArrayDict, Arrays, Compress, Share
from strategies.stored import Head

INDICES, VALUES = "top_k:indices", "top_k:values"


@dataclass(frozen=True)
class TopK(Compress):
    """p = delta + e;  the k entries of p that are largest in size are sent, as c(p);  e <- p - c(p), from e = 0.

        k = ceil(fraction n), of the n shared weights of the whole network together;  ||e|| <= sqrt(1 - k / n) ||p||

    Source: sparsified SGD with memory (Stich, Cordonnier, Jaggi, NeurIPS 2018), on the moves of a round. Entries that
    are not sent move by 0. The error e stays with the client, like its other state: it survives a resumed run, and an
    update that the server refuses leaves it as it was before. Of equally large entries the first ones are sent. On the
    wire are k positions of four bytes and k values of four bytes. Half of all entries would thus be as long as all.

    fraction: k / n
    """

    fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    keeps_error: ClassVar[bool] = True
    breaks = (Fact.EVERY_ENTRY,)

    def refuses(self, recipe: RecipeParts) -> str:
        """A client must send the same entries in every round, because it keeps an error for each of them."""
        (share,) = recipe.of(Share)
        if not share.partial:
            return ""
        return f"top_k keeps an error of every weight, and {part_name(share)} sends others in each round; {BOTH}"

    def count(self, heads: Mapping[str, Head]) -> int:
        """k for these tensors."""
        return math.ceil(self.fraction * entries_of(heads))

    def form(self, heads: Mapping[str, Head]) -> dict[str, Head]:
        """k positions and k values."""
        shape = (self.count(heads),)
        return {INDICES: (shape, np.dtype(np.uint32)), VALUES: (shape, np.dtype(np.float32))}

    def encode(self, moves: Arrays, rng: np.random.Generator) -> ArrayDict:
        """The largest entries, in the order of their positions; no draw is needed."""
        flat = np.concatenate([np.zeros(0, np.float32), *(move.reshape(-1) for move in moves.values())])
        flat = flat.astype(np.float32, copy=False)
        indices = largest(np.abs(flat), math.ceil(self.fraction * len(flat)))
        return {INDICES: indices.astype(np.uint32), VALUES: flat[indices]}

    def decode(self, sent: Arrays, heads: Mapping[str, Head]) -> ArrayDict:
        """c(p), which is 0 where nothing was sent; ValueError for positions that do not rise or do not exist."""
        indices = sent[INDICES].astype(np.int64)
        flat = np.zeros(entries_of(heads), np.float32)
        if len(indices) and ((np.diff(indices) <= 0).any() or indices[-1] >= len(flat)):
            raise ValueError("the positions of its entries do not rise, or lie outside of the model")
        flat[indices] = sent[VALUES]
        moves: ArrayDict = {}
        start = 0
        for name, (shape, dtype) in heads.items():
            end = start + math.prod(shape)
            moves[name] = flat[start:end].astype(dtype).reshape(shape)
            start = end
        return moves


def entries_of(heads: Mapping[str, Head]) -> int:
    """The number of all entries of these tensors."""
    return sum(math.prod(shape) for shape, _ in heads.values())


def largest(sizes: np.ndarray, count: int) -> np.ndarray:
    """The positions of the `count` largest sizes, in rising order; of equal ones the first.

    >>> largest(np.array([2.0, 5.0, 2.0, 3.0]), 3)
    array([0, 1, 3])
    """
    if not count:
        return np.zeros(0, np.int64)
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    above = np.flatnonzero(sizes > least)
    equal = np.flatnonzero(sizes == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))
