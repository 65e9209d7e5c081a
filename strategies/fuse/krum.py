"""Krum and Multi-Krum: only the models that are closest to many others count."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from fedsim.parts.facts import Fact
from fedsim.settings.experiment import Experiment
from strategies.aggregate import Arrays, weighted_mean
from strategies.fuse.enough_clients import refuse_too_few
from strategies.parts import ArrayDict, Fuse, ServerRound, Update
from strategies.tools.moves import gram, moves


def selected_by_krum(deltas: Sequence[Arrays], malicious: int, count: int) -> list[int]:
    """Places of the `count` moves with the lowest Krum scores, best first.

    Every distance comes from the two moves alone, so that a huge move of an attacker takes no digits from the others.
    """
    products = gram(deltas)
    squares = np.diag(products)
    distances = squares[:, None] + squares[None, :] - 2 * products
    nearest = max(1, len(deltas) - malicious - 2)
    scores = [row[np.argsort(row)[1 : nearest + 1]].sum() for row in distances]
    return np.argsort(scores)[:count].tolist()


@dataclass(frozen=True)
class Krum(Fuse):
    """score_k = sum of ||theta_k - theta_j||^2 over the K - f - 2 nearest j; theta = mean of the `select` lowest.

    Source: Blanchard et al., NeurIPS 2017 (Krum: `select = 1`, Multi-Krum: more), by Flower's rule, on the shared
    parameters: the selection equals Flower's, which needs all models in memory at once. The mean of the selected whole
    models is weighted by the recipe's weights, as in Flower's MultiKrum. The paper's guarantee needs K >= 2 f + 3
    clients; it does not hold in a round in which so many fail that fewer remain. `select` of at least K gives FedAvg.

    malicious: f, the number of clients that may send anything
    select: the number of models that are averaged
    """

    malicious: Annotated[int, Field(ge=0)] = 0
    select: Annotated[int, Field(ge=1)] = 1
    breaks = (Fact.WEIGHTED_MEAN, Fact.EVERY_CLIENT)

    def check(self, experiment: Experiment) -> None:
        """Raises UserError when the federation is too small for that many malicious clients."""
        refuse_too_few(experiment, "krum", 2, self.malicious)

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The mean of the selected models. The others have 0 in their weight column."""
        indices = sorted(selected_by_krum(moves(updates, server), self.malicious, self.select))
        chosen = [updates[index] for index in indices]
        shares = np.array([weights[update.client] for update in chosen])
        shares = shares / shares.sum() if shares.sum() > 0 else np.full(len(chosen), 1 / len(chosen))
        counted = dict(zip([update.client for update in chosen], shares))
        server.client_columns |= {u.client: {"weight": float(counted.get(u.client, 0.0))} for u in updates}
        return weighted_mean([update.arrays for update in chosen], shares)
