"""FedOMG: the server finds one direction that agrees with the move of every client."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedsim.common.errors import UserError
from fedsim.parts.facts import Fact, Facts
from fedsim.settings.effect import Only
from fedsim.settings.experiment import Experiment
from fedsim.settings.tuned import Tuned
from strategies.aggregate import weighted_mean
from strategies.parts import ArrayDict, Fuse, ServerRound, Update
from strategies.tools.moves import gram, mean_move, moved, moves

EPS = 1e-4
SHORT_MOVE = 0.05  # below this mean length of the moves, EPS changes the result visibly
ALONE = (
    "gradient_matching: one client, or no move, has no direction to find; the model of such a round is the clients' "
    "weighted mean, as with FedAvg"
)
logger = logging.getLogger("fedsim")


@dataclass(frozen=True)
class GradientMatching(Fuse):
    """theta <- theta + sum_k a_k delta_k, with a_k = (1/K + Gamma_k c ||g_0|| / ||g_Gamma||) / (1 + c^2).

        Gamma = the minimizer over the simplex of  g_Gamma . g_0 + c ||g_0|| ||g_Gamma||
        g_0 = the mean of all delta_k,  g_Gamma = sum_k Gamma_k delta_k

    Source: FedOMG (Nguyen et al., ICLR 2025): CAGrad's direction for the clients' moves delta_k = theta_k - theta over
    the shared parameters, flattened together. Only the inner products of the delta_k are needed. All other tensors take
    their weighted mean, also parameters that clients upload and keep; the weights of the clients act nowhere else. The
    server's learning rate is the part `server_step`. One client alone, or moves that are all 0, give FedAvg. `c = 0`
    gives FedAvg with uniform weights for the parameters.

    c: the radius of the ball around the mean direction, in units of its length
    solver: `descent` as released (gradient descent on a softmax, moves scaled to a mean length of about 1, 1e-4 added
    under every root), or `exact`, the minimizer without these, for c below 1
    lr, momentum, steps: the settings of the descent; the best of all its points is taken
    relative_eps: leaves the 1e-4 out of the scaling, so that the result does not depend on the length of the moves
    rescale: divides by 1 + c^2 as released; the paper's formula does not
    scale: `weights` multiplies delta_k by the client's weight p_k, so that the weights of another part act
    variant: `official` scales by p_k, moves half as far, and with two or more replies does not average shared buffers,
    so that their running statistics keep the initial values
    """

    c: Annotated[float, Field(ge=0), Tuned("0.25,0.3,0.4,0.5", "the released scripts")] = 0.5
    solver: Literal["descent", "exact"] = "descent"
    lr: Annotated[float, Field(gt=0), Only(solver="descent")] = 25.0
    momentum: Annotated[float, Field(ge=0, lt=1), Only(solver="descent")] = 0.5
    steps: Annotated[int, Field(ge=1), Only(solver="descent")] = 20
    relative_eps: Annotated[bool, Only(solver="descent")] = False
    rescale: bool = True
    scale: Literal["none", "weights"] = "none"
    variant: Literal["default", "official"] = "default"

    def check(self, experiment: Experiment) -> None:
        """Raises UserError where the minimizer is not one point."""
        if self.solver == "exact" and self.c >= 1:
            raise UserError(f"method.gradient_matching.c is {self.c:g}; solver = 'exact' needs less than 1, because "
                            "the minimum may be a direction of length 0; use solver = 'descent'")  # fmt: skip

    @property
    def uses_weights(self) -> bool:
        """Whether p_k acts on parameters."""
        return self.scale == "weights" or self.variant == "official"

    @property
    def breaks(self) -> Facts:
        """The model may move further than its clients, and p_k may not act."""
        return (Fact.WEIGHTED_MEAN, Fact.CLIENTS_MOVE, *(() if self.uses_weights else (Fact.CLIENT_WEIGHTS,)))

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The fused model.

        details.csv gets for each client its Gamma, the cosine of its move with the direction, and the length of its
        move. For the round it gets the least inner product of a move with the direction, and that of a move with the
        mean g_0.
        """
        shares = [weights[update.client] for update in updates]
        fused = weighted_mean([update.arrays for update in updates], shares)
        deltas = moves(updates, server)
        scales = shares if self.uses_weights else [1.0] * len(updates)
        products = gram(deltas)
        g = products * np.outer(scales, scales)
        if len(updates) == 1 or not g.diagonal().any():
            if not server.state.get("told"):
                server.state["told"] = True
                server.note(ALONE)
            return fused
        gamma, a = self.solve(g)
        if self.variant == "official":
            a = 0.5 * a
            for name in fused.keys() - server.parameters:
                if server.places.get(name, "shared") == "shared":
                    fused[name] = np.array(server.previous[name])
        for name in deltas[0]:
            fused[name] = moved(name, mean_move(deltas, list(a * scales), name), server)
        self._record(updates, server, products, np.array(scales), gamma, a)
        return fused

    def solve(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(Gamma [K], a [K]) from the Gram matrix [K, K] of the moves."""
        if self.solver == "exact":
            gamma, length, eps = self._exact(g), np.sqrt(max(g.mean(), 0.0)), 0.0  # rounding may leave it below 0
        else:
            s = np.sqrt(g.diagonal() + (0.0 if self.relative_eps else EPS)).mean()
            g = g / s**2
            length, eps = np.sqrt(max(g.mean(), 0.0) + EPS), EPS
            gamma = self._descent(g, self.c * length)
        norm = np.sqrt(max(gamma @ g @ gamma, 0.0) + eps) + eps
        pull = self.c * length / norm if norm > 0 else 0.0
        a = 1 / len(g) + gamma * pull
        return gamma, a / (1 + self.c**2) if self.rescale else a

    def _descent(self, g: np.ndarray, radius: float) -> np.ndarray:
        """The best Gamma = softmax(w) of gradient descent from w = 0."""
        b, w, buffer = g.mean(1), np.zeros(len(g)), None
        best, lowest = np.full(len(g), 1 / len(g)), np.inf
        for step in range(self.steps + 1):
            shifted = np.exp(w - w.max())
            gamma = shifted / shifted.sum()
            root = np.sqrt(gamma @ g @ gamma + EPS)
            value = gamma @ b + radius * root
            if value < lowest:
                best, lowest = gamma, value
            if step < self.steps:
                slope = b + radius * (g @ gamma) / root
                gradient = gamma * (slope - gamma @ slope)
                buffer = gradient if buffer is None else self.momentum * buffer + gradient
                w = w - self.lr * buffer
        return best

    def _exact(self, g: np.ndarray) -> np.ndarray:
        """The minimizer over the simplex. The moves are scaled to a mean length of 1, which helps the solver."""
        from scipy.optimize import minimize  # this import is slow, and no other method needs it

        g = g / np.sqrt(g.diagonal()).mean() ** 2
        b, radius, start = g.mean(1), self.c * np.sqrt(max(g.mean(), 0.0)), np.full(len(g), 1 / len(g))

        def value(gamma: np.ndarray) -> float:
            return gamma @ b + radius * np.sqrt(max(gamma @ g @ gamma, 0.0))

        solution = minimize(value, start, method="SLSQP", bounds=[(0, 1)] * len(g), options={"ftol": 1e-14},
                         constraints={"type": "eq", "fun": lambda gamma: gamma.sum() - 1})  # fmt: skip
        gamma = np.maximum(solution.x, 0.0)
        gamma = gamma / gamma.sum()
        return gamma if value(gamma) <= value(start) else start

    def _record(
        self,
        updates: Sequence[Update],
        server: ServerRound,
        products: np.ndarray,
        scales: np.ndarray,
        gamma: np.ndarray,
        a: np.ndarray,
    ) -> None:
        """Writes the details and the coefficients; warns where moves are short."""
        g = products * np.outer(scales, scales)
        moves, lengths = np.sqrt(products.diagonal()), np.sqrt(g.diagonal())
        direction = np.sqrt(max(a @ g @ a, 0.0))
        cosines = (g @ a) / np.maximum(lengths * direction, 1e-30)
        for index, update in enumerate(updates):
            server.detail(update.client, "matching_gamma", "model", gamma[index])
            server.detail(update.client, "matching_cosine", "model", cosines[index])
            server.detail(update.client, "move_length", "model", moves[index])
            server.client_columns[update.client] = {"weight": float(a[index])}
        server.detail("", "least_inner_product", "direction", min(products @ (a * scales)))
        server.detail("", "least_inner_product", "mean", min(products @ scales) / len(scales))
        self._warn(server, moves.mean(), lengths.mean())

    def _warn(self, server: ServerRound, move: float, length: float) -> None:
        """Says once that moves are short, by their mean length, with which g was made."""
        short = length < SHORT_MOVE and self.solver == "descent" and not self.relative_eps
        if short and not server.state.get("warned"):
            server.state["warned"] = True
            scaled = ", and are multiplied by the clients' weights" if self.uses_weights else ""
            text = ("the clients' moves are %.3g long on average%s, so that the 1e-4 in gradient_matching's scaling "
                    "changes the result; relative_eps = true leaves it out")  # fmt: skip
            logger.warning(text, move, scaled)
