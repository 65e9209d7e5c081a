"""Centered clipping: every client's move is shortened to a radius around the last move of the global model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedsim.parts.facts import Fact
from fedsim.settings.tuned import DECADE, Tuned
from strategies.fuse.enough_clients import equal_columns
from strategies.fuse.geometric_median import distances
from strategies.fuse.trimmed_mean import trimmed_mean
from strategies.parts import ArrayDict, Arrays, Fuse, ServerRound, Update
from strategies.tools.moves import gram, mean_move, moved, moves


def clipped_shares(products: np.ndarray, radius: float, iterations: int) -> np.ndarray:
    """The shares a [K + 1] of the new v = a_0 v + sum_k a_k delta_k, after `iterations` of

        v <- v + (1/K) sum_k (delta_k - v) min(1, radius / ||delta_k - v||)

    products [K + 1, K + 1] are the inner products of the v of before (the first row) and of the K moves.
    """
    points = np.eye(len(products))
    shares = points[0]
    for _ in range(iterations):
        away = distances(products, shares)[1:]
        scale = np.minimum(1.0, radius / np.maximum(away, np.finfo(float).tiny))
        shares = shares + scale @ (points[1:] - shares) / len(away)
    return shares


@dataclass(frozen=True)
class CenteredClipping(Fuse):
    """v <- v + (1/K) sum_k (delta_k - v) min(1, r / ||delta_k - v||), `iterations` times; then theta <- theta + v.

    Source: Karimireddy et al., ICML 2021, in the form of the later released code (byzantine-robust-noniid-optimizer).
    delta_k = theta_k - theta on the shared parameters, with one norm over all of them. v starts at 0, is kept over the
    rounds and is in the checkpoint. Clients count equally. All other tensors take the coordinate-wise median, because
    a mean of running statistics would let one client spoil them. A huge `tau` gives FedAvg with uniform weights for the
    parameters.

    The paper's workers send momenta, whose length hardly depends on the task, and its radius is a number, r = tau = 10.
    Our clients send whole updates of a round, so that by default the radius is a multiple of their median length.

    tau: the radius r, in the unit that `unit` names
    unit: "median" is r = tau median_k ||delta_k|| (ours), "absolute" is r = tau (paper, where tau is 10)
    iterations: how often the moves are clipped around the new v, L of the paper
    """

    tau: Annotated[float, Field(gt=0), Tuned("log:0.1:10", DECADE)] = 1.0
    unit: Literal["median", "absolute"] = "median"
    iterations: Annotated[int, Field(ge=1)] = 1
    breaks = (Fact.WEIGHTED_MEAN, Fact.CLIENT_WEIGHTS)

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The parameters moved by v, the rest by the median. Every client has 1/K in its weight column."""
        states, deltas = [update.arrays for update in updates], moves(updates, server)
        names = list(deltas[0])
        center = {name: server.arrays.get(name, np.zeros(server.previous[name].shape)) for name in names}
        points: list[Arrays] = [center, *deltas]
        products = gram(points)
        lengths = np.sqrt(np.diag(products)[1:])
        radius = self.tau * (float(np.median(lengths)) if self.unit == "median" else 1.0)
        shares = clipped_shares(products, radius, self.iterations)
        rest = [name for name in states[0] if name not in center]
        fused = trimmed_mean([{name: state[name] for name in rest} for state in states], (len(states) - 1) // 2)
        for name in names:
            server.arrays[name] = mean_move(points, shares, name)
            fused[name] = moved(name, server.arrays[name], server)
        equal_columns(updates, server)
        return {name: fused[name] for name in states[0]}
