"""RFA: the geometric median of the clients' models, which a few models far away cannot move far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from strategies.aggregate import weighted_mean
from strategies.parts import ArrayDict, Fuse, ServerRound, Update
from strategies.tools.moves import gram, moves


def distances(products: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """||v - x_k|| of each of the K points from v = sum_j a_j x_j, given their inner products [K, K]."""
    offsets = shares - np.eye(len(products))
    return np.sqrt(np.einsum("ki,ij,kj->k", offsets, products, offsets).clip(0))


def median_shares(products: np.ndarray, weights: np.ndarray, iterations: int, floor: float, tol: float) -> np.ndarray:
    """The shares [K], with sum 1, by which `iterations` of Weiszfeld's rule write the median as a mean of the points.

    products [K, K] are the inner products of the points, and weights [K] their p_k with sum 1. It stops earlier when
    sum_k p_k ||v - x_k|| changes by less than `tol` times itself.
    """
    shares, before = weights, np.inf
    for _ in range(iterations):
        away = distances(products, shares)
        objective = float(weights @ away)
        if abs(before - objective) < tol * objective:
            break
        before = objective
        shares = weights / np.maximum(away, floor)
        shares = shares / shares.sum()
    return shares


@dataclass(frozen=True)
class GeometricMedian(Fuse):
    """theta = sum_k w_k theta_k, w_k = a_k / sum_j a_j, a_k = p_k / max(nu, ||v - theta_k||), `iterations` times over.

    v is the mean of before, at first sum_k p_k theta_k. There is one norm over all shared parameters. This is the
    smoothed rule of Weiszfeld for the v with the smallest sum_k p_k ||v - theta_k||. It stops earlier when that sum
    changes by less than `tolerance` times itself.

    Source: RFA (Pillutla et al., IEEE TSP 2022), Algorithm 2, with the numbers of the released code. Running statistics
    and counters have no part in the distances, and take their mean with the same w_k, so that they fit the model. The
    distances come from the inner products of the moves, so that no model is held in memory. Half of the weight p_k must
    be honest. A client that merely has another domain looks like an attacker: it gets less weight. `iterations = 0`
    gives FedAvg.

    iterations: the number of times that the mean is computed again; the released code has 4
    nu: the smallest distance by which a client's weight is divided
    tolerance: the relative change of the sum of distances below which the rule stops
    """

    iterations: Annotated[int, Field(ge=0)] = 4
    nu: Annotated[float, Field(gt=0)] = 1e-5
    tolerance: Annotated[float, Field(ge=0)] = 1e-6

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The mean of whole models by the shares of the median, which are in the column `weight` of clients.csv."""
        given = np.array([weights[update.client] for update in updates])
        shares = median_shares(gram(moves(updates, server)), given, self.iterations, self.nu, self.tolerance)
        server.client_columns |= {
            update.client: {"weight": float(share)} for update, share in zip(updates, shares, strict=True)
        }
        return weighted_mean([update.arrays for update in updates], shares)
