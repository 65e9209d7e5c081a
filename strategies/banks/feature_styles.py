"""StableFDG's bank: the style of every client's features, which one other client gets."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.models.inserts.style_exploration import StyleLayers
from strategies.banks.checks import fault
from strategies.parts import Arrays, Bank, Entries, ServerRound, When

ROWS = 4  # mean of the means, mean of the deviations, deviation of the means, deviation of the deviations
STYLE = "style"  # the array of a record


def derangement(count: int, rng: np.random.Generator) -> np.ndarray:
    """A permutation [count] that leaves nothing in its place, drawn uniformly from all of these; count >= 2.

    Permutations are drawn until one fits, which takes e = 2.7 draws on average.
    """
    while True:
        drawn = rng.permutation(count)
        if not (drawn == np.arange(count)).any():
            return drawn


@dataclass(frozen=True)
class FeatureStyles(Bank):
    """S = {k: s_k}, s_k float32 [4, C_1]: mean and spread of the style of client k's images after the first stage.

    In every round the clients that take part are paired at random so that nobody gets its own style and every style is
    used once. A client gets the newest style of its partner, 4 C_1 numbers, or nothing if the partner has not trained
    yet or nobody else takes part; it then trains without sharing.

    Source: StableFDG (Park et al., NeurIPS 2023). The released code collects the styles of the received model before
    training and hands them out in the same round. Here they come with the trained models and go out in the next round
    (our choice), which needs no further exchange; the first round has no sharing in either.

    shared: false turns the bank off; `enlarged_batch` sets it where nothing is shared
    """

    shared: bool = True
    name: ClassVar[str] = "feature_style"
    when: ClassVar[When] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses wrong names, shapes, NaN and deviations that are not positive."""
        if reason := fault(arrays, {STYLE: 2}):
            return reason
        if len(arrays[STYLE]) != ROWS:
            return f"{STYLE} has {len(arrays[STYLE])} rows, expected {ROWS}"
        least = arrays[STYLE][1:].min()  # the means aside
        return "" if least > 0 else f"a deviation is {least:g}, expected more than 0"

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """The style of this round's partner of `client`; an empty record where there is none."""
        if client not in server.drawn or len(server.drawn) < 2:
            return {}
        partners = derangement(len(server.drawn), server.rng("style pairs"))
        return bank.get(server.drawn[partners[server.drawn.index(client)]], {})

    def traffic(self, server: ServerRound) -> tuple[int | None, int]:
        """4 C_1 floats each way."""
        styles = server.build_net().styles
        assert isinstance(styles, StyleLayers)  # the part needs this insert
        size = 4 * ROWS * styles.channels
        return size, size
