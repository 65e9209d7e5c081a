"""Generalization adjustment: aggregation weights that follow how much worse the global model is than the local one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strategies.parts import ServerRound, Update, Weights

VARIANTS = ("centred", "paper", "official")
TINY = 1e-12


def step_size(d: float, round: int, rounds: int, variant: str = "centred") -> float:
    """Step of round t = `round` (1-based) of T = `rounds`: it falls linearly from d to d/T.

    centred, paper: d_t = d (1 − (t−1)/T) ;  official: d − (i−1) d/T  with i = t − 1

    Source: FedDG-GA (Zhang et al., CVPR 2023), (1 − t/T) d; the official code counts rounds i = 0..T and so starts at
    d (1 + 1/T), while all gaps are still zero.
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
    """Move aggregation weight towards clients with a large generalization gap.

    dev_k = G_k − mean_j G_j ;  a_k ← clip(a_k + step · dev_k / N, a_min, 1) ;  a ← a / Σ a

    variant: "centred" N = max_j |dev_j| (default: |Δ_k| ≤ step, equal gaps change nothing); "paper" N = max_j dev_j;
    "official" a_k ← clip(a_k + step/K · G_k / max_j |G_j|, a_min, 1), not centred, K = number of known clients.
    weights: a of every known client, sum 1. gaps: G_k of the clients that reported, E_k(θ) − E_k(θ_k) for a loss and
    acc_k(θ_k) − acc_k(θ) for accuracy: larger means that the global model serves this client worse. NaN = no gap.

    Only clients with a finite gap move, and together they keep their previous mass (failed or absent clients keep a_k).
    A client seen for the first time enters with 1/(number of clients known before), then all are renormalised.
    a is unchanged with fewer than two finite gaps, with N = 0, or when clipping leaves nothing. The floor a_min acts
    before the renormalisation.

    Source: FedDG-GA (Zhang et al., CVPR 2023). Clipping, |·| in N and the branches above are ours where the paper is
    silent; "official" follows the released code with its hard-coded 3 replaced by K and its 0/0 replaced by no change.
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
    """Known weights plus newcomers at 1/(number known), with sum 1; unchanged when nobody is new."""
    newcomers = sorted(set(gaps) - set(weights))
    if not newcomers:
        return weights
    grown = weights | dict.fromkeys(newcomers, 1.0 / max(len(weights), 1))
    total = math.fsum(grown.values())
    return {client: weight / total for client, weight in grown.items()}


def _directions(gaps: dict[str, float], variant: str) -> dict[str, float]:
    """Gap of every client over the variant's N; empty when N = 0 (up to rounding of the largest gap)."""
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
    """Moves aggregation weight towards clients on which the global model generalizes worse than their own.

    G_k = E_k(theta^(t-1)) - E_k(theta_k^(t-1)), measured on the client (part `generalization_gap`);
    a <- adjust_weights(a, G, d (1 - (t-1)/T)), initially 1/K;  p_k = a_k / sum of a over the clients that delivered.
    FedDG-GA (Zhang et al., CVPR 2023), core.md 3. `d=0` gives uniform weights (FedAvg for equal sizes).

    d: initial step size (official code: 0.2). variant: `centred` (default), `paper` or `official`, see adjust_weights.
    `official` also measures the gap as the released code does, by validation accuracy (core.md 3.7 item 2), unless
    `method.generalization_gap.metric` says otherwise.
    a_min: floor of the weights (default 0; a client at 0 may come back).
    """

    d: Annotated[float, Field(ge=0)] = 0.2
    variant: Literal["centred", "paper", "official"] = "centred"
    a_min: Annotated[float, Field(ge=0, lt=1)] = 0.0
    requires: ClassVar[dict[str, str]] = {"reports": "generalization_gap"}
    needs: ClassVar[tuple[str, ...]] = ("gap", "gap_valid")

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """The released code's metric with its variant."""
        official = {"generalization_gap": {"metric": "validation_accuracy"}}
        return official if self.variant == "official" else {}

    def weigh(self, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
        """Adjusts a by this round's gaps (invalid ones do not count), then renormalises over the updates."""
        known = server.state.setdefault("a", {client: 1.0 / len(server.clients) for client in server.clients})
        gaps = {update.client: update.metrics["gap"] for update in updates if update.metrics["gap_valid"]}
        if self.d > 0 and gaps:
            known = adjust_weights(
                known, gaps, step_size(self.d, server.round, server.rounds, self.variant), self.variant, self.a_min
            )
        server.state["a"] = known
        total = math.fsum(known[update.client] for update in updates)
        if total <= TINY:  # all who delivered stand at 0: nothing tells them apart
            return {update.client: 1.0 / len(updates) for update in updates}
        return {update.client: known[update.client] / total for update in updates}
