"""The permutations of JiGen's nine tiles, equal on every client; `generate` made them once."""

import itertools
import random

import numpy as np

TILES = 9
WORDS = """
704583126 546870231 138462507 387601452 623158740 850217364 475026813 261734085 510768423 460382751
607415283 254061738 847532610 174308265 321540867 285173604 801376542 078654321 730821645 436518072
832057146 865314207 651824370 842716053 678135402 153476820 421708536 128507643 617283054 056487132
"""
# Output tile t of a permutation shows tile P[t] of the image. The identity is label 0 and not in this list.
PERMUTATIONS = tuple(tuple(int(tile) for tile in word) for word in WORDS.split())


def generate(count: int = 30, seed: int = 0) -> list[tuple[int, ...]]:
    """Chooses permutations far from each other.

    Each next permutation has the largest minimal Hamming distance to the identity and to those chosen before it; the
    seed breaks ties. The published list of JiGen has distances from 4 to 9.
    """
    pool = np.array(list(itertools.permutations(range(TILES))), dtype=np.uint8)
    draw = random.Random(seed)
    least = (pool != np.arange(TILES, dtype=np.uint8)).sum(1)
    found: list[tuple[int, ...]] = []
    for _ in range(count):
        best = np.flatnonzero(least == least.max())
        chosen = pool[best[draw.randrange(len(best))]]
        found.append(tuple(int(tile) for tile in chosen))
        least = np.minimum(least, (pool != chosen).sum(1))
    return found
