"""Generalization adjustment: weights that grow where the global model is worse than the client's own model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedsim.settings.tuned import Tuned
from strategies.parts import ServerRound, Update, Weights

VARIANTS = ("centred", "paper", "official")
TINY = 1e-12


def step_size(d: float, round: int, rounds: int, variant: str = "centred") -> float:
    """The step of round t = `round` (from 1) of T = `rounds`, which falls linearly from d to d/T.

        centred, paper:  d_t = d (1 − (t−1)/T)
        official:        d − (i−1) d/T  with i = t − 1

    Raises ValueError for a round outside 1..T.

    Source: FedDG-GA (Zhang et al., CVPR 2023), (1 − t/T) d. The official code counts rounds i = 0..T and so starts at d
    (1 + 1/T), in the round in which all gaps are still zero.
    """
    _check_variant(variant)
    if not 1 <= round <= rounds:
        raise ValueError(f"round {round} is outside 1..{rounds}")
    elapsed = round - 1 if variant != "official" else round - 2
    return d * (1.0 - elapsed / rounds)


def adjust_weights(
    weights: Mapping[str, float],
    gaps: Mapping[str, float],
    step: float,
    variant: str = "centred",
    a_min: float = 0.0,
) -> dict[str, float]:
    """Moves aggregation weight towards clients with a large generalization gap.

        dev_k = G_k − mean_j G_j ;  a_k ← clip(a_k + step · dev_k / N, a_min, 1) ;  a ← a / Σ a

    variant: "centred" has N = max_j |dev_j| (default: |Δ_k| ≤ step, and equal gaps change nothing). "paper" has N =
    max_j dev_j. "official" is a_k ← clip(a_k + step/K · G_k / max_j |G_j|, a_min, 1), not centred, with K the number of
    known clients
    weights: a of every known client, with sum 1
    gaps: G_k of the clients that reported: E_k(θ) − E_k(θ_k) for a loss, acc_k(θ_k) − acc_k(θ) for accuracy. A larger
    gap means that the global model suits this client less. NaN means no gap

    Only the weights of clients with a finite gap move, and together these clients keep their previous mass; failed or
    absent clients keep a_k. A client seen for the first time starts with 1/(number of clients known before), and then
    all are renormalized. a does not change with fewer than two finite gaps, with N = 0, or when clipping leaves
    nothing. The floor a_min acts before the renormalization.

    Source: FedDG-GA (Zhang et al., CVPR 2023). Clipping, |·| in N and the branches above are ours where the paper says
    nothing. "official" is the released code, with K in place of its fixed 3, and no change in place of its 0/0.
    """
    _check_variant(variant)
    weights = _admit_new(dict(weights), gaps)
    finite = {client: float(gaps[client]) for client in sorted(gaps) if math.isfinite(gaps[client])}
    if len(finite) < 2:
        return weights
    change = _directions(finite, variant)
    if not change:
        return weights
    step = step / len(weights) if variant == "official" else step
    moved = {client: min(max(weights[client] + step * change[client], a_min), 1.0) for client in finite}
    total = math.fsum(moved.values())
    if total <= TINY:
        return weights
    mass = math.fsum(weights[client] for client in finite)
    return weights | {client: mass * weight / total for client, weight in moved.items()}


def _admit_new(weights: dict[str, float], gaps: Mapping[str, float]) -> dict[str, float]:
    """The known weights plus new clients with 1/(number known), with sum 1; unchanged when no client is new."""
    newcomers = sorted(set(gaps) - set(weights))
    if not newcomers:
        return weights
    grown = weights | dict.fromkeys(newcomers, 1.0 / max(len(weights), 1))
    total = math.fsum(grown.values())
    return {client: weight / total for client, weight in grown.items()}


def _directions(gaps: dict[str, float], variant: str) -> dict[str, float]:
    """The gap of every client divided by the variant's N; empty when N = 0 (up to rounding of the largest gap)."""
    mean = 0.0 if variant == "official" else math.fsum(gaps.values()) / len(gaps)
    deviation = {client: gap - mean for client, gap in gaps.items()}
    largest = max(deviation.values()) if variant == "paper" else max(map(abs, deviation.values()))
    if largest <= TINY * max(1.0, *map(abs, gaps.values())):
        return {}
    return {client: value / largest for client, value in deviation.items()}


def _check_variant(variant: str) -> None:
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: {', '.join(VARIANTS)}")


@dataclass(frozen=True)
class GeneralizationAdjustment(Weights):
    """Moves aggregation weight towards clients for which the global model generalizes worse than their own.

        G_k = E_k(theta^(t-1)) - E_k(theta_k^(t-1)), measured on the client (part `generalization_gap`)
        a <- adjust_weights(a, G, d (1 - (t-1)/T)), initially 1/K;  p_k = a_k / sum_j a_j over the clients that replied

    Source: FedDG-GA (Zhang et al., CVPR 2023). `d = 0` gives FedAvg with uniform weights.

    d: the initial step size (0.2 in the official code)
    variant: `centred` (default), `paper` or `official`, see adjust_weights. `official` also measures the gap by
    validation accuracy, as the released code does, unless `method.generalization_gap.metric` is set
    a_min: the floor of the weights (default 0; a client with weight 0 may get weight again)
    """

    d: Annotated[float, Field(ge=0), Tuned("log:0.05:0.5", "ours: around the official 0.2")] = 0.2
    variant: Literal["centred", "paper", "official"] = "centred"
    a_min: Annotated[float, Field(ge=0, lt=1)] = 0.0
    requires: ClassVar[dict[str, str]] = {"reports": "generalization_gap"}
    needs: ClassVar[tuple[str, ...]] = ("gap", "gap_valid")
    with_few: ClassVar[str] = (
        "two gaps always lie equally far from their mean, so that the weights take the whole step "
        "however small the difference is, and one gap moves nothing"
    )

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """The metric of the released code, together with its variant."""
        official: dict[str, dict[str, object]] = {"generalization_gap": {"metric": "validation_accuracy"}}
        return official if self.variant == "official" else {}

    @property
    def depends_on_rounds(self) -> bool:
        """The step falls until the last round."""
        return self.d > 0

    def weigh(self, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
        """Adjusts a by this round's gaps (invalid ones do not count), then renormalizes over the updates."""
        weights = server.state.setdefault("a", {client: 1.0 / len(server.clients) for client in server.clients})
        gaps = {update.client: update.metrics["gap"] for update in updates if update.metrics["gap_valid"]}
        if self.d > 0 and gaps:
            weights = adjust_weights(
                weights, gaps, step_size(self.d, server.round, server.rounds, self.variant), self.variant, self.a_min
            )
        server.state["a"] = weights
        total = math.fsum(weights[update.client] for update in updates)
        if total <= TINY:  # all clients that replied have 0, so that they get equal weights
            return {update.client: 1.0 / len(updates) for update in updates}
        return {update.client: weights[update.client] / total for update in updates}
