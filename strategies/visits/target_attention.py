"""FADA's dynamic attention: the weight of a source grows with how much its model tightens the target's clusters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedsim.parts.facts import Fact
from fedsim.parts.part import RecipeParts
from fedsim.settings.effect import Only
from strategies.parts import Arrays, ServerRound, Update, Visit, Weights


def attention(tightness: np.ndarray, mode: str = "relative", temperature: float = 0.1) -> np.ndarray:
    """alpha = softmax(g), with g_i = (I_0 - I_i) / I_0 / temperature, or g_i = I_0 - I_i for mode "raw".

    tightness: I_0 of the model before the round, then I_i of every source, [N + 1]. The result is uniform where I_0 is
    0
    """
    before, gains = tightness[0], tightness[0] - tightness[1:]
    if mode == "relative":
        gains = gains / before / temperature if before > 0 else np.full(len(gains), np.nan)
    if before <= 0 or not np.isfinite(gains).all():
        return np.full(len(gains), 1 / len(gains))
    powers = np.exp(gains - gains.max())
    return powers / powers.sum()


@dataclass(frozen=True)
class TargetAttention(Visit, Weights):
    """theta <- theta + sum_i alpha_i (theta_i - theta), alpha = softmax(g), g_i = (I_0 - I_i) / (att_temp * I_0).

    The sum is over the sources that replied. I_i is the tightness of the target's clusters under the model of source i;
    the target's client measures it before the weights are needed.

    Source: FADA (Peng et al., ICLR 2020). Numbers of examples do not count. When the target's client does not answer,
    the last alpha is used again, restricted to these sources and renormalized. A single source has alpha = 1, and the
    target's client is not asked.

    att: `relative` (our default, because raw gains grow with the sample and saturate), or `raw`: g_i = I_0 - I_i (the
    paper)
    att_temp: the temperature of relative gains. A very large one gives FedAvg with uniform weights
    """

    att: Literal["relative", "raw"] = "relative"
    att_temp: Annotated[float, Field(gt=0), Only(att="relative")] = 0.1
    phase: ClassVar[str] = "attention"
    moment: ClassVar[Literal["updates", "model"]] = "updates"
    records: ClassVar[tuple[str, ...]] = ("tightness",)
    requires: ClassVar[dict[str, str]] = {"visits": "target_attention"}
    discloses: ClassVar[str] = "to the unseen domain's client: every single client's model"
    assumes = (*Visit.assumes, Fact.CLIENT_WEIGHTS)

    def refuses(self, recipe: RecipeParts) -> str:
        """The target's client would see every model for weights that nobody takes."""
        advice = (
            "target_attention visits for the weights of method.weights alone; name it there, or not in method.visits"
        )
        return advice if len(recipe.of(Weights)) > 1 else ""

    def ask(self, model: Arrays, server: ServerRound) -> Mapping[str, Arrays] | None:
        """The model at the start of the round, and that of every source; both sides sort the names."""
        if len(server.updates) < 2:
            return None
        models = [{**server.previous, **update.arrays} for update in server.updates]
        candidates = {f"candidate:{place:04d}": trained for place, trained in enumerate(models)}
        return {"arrays": server.previous, **candidates}

    def accept(self, records: Mapping[str, Arrays], server: ServerRound) -> str:
        """Refuses all but one number of at least 0 for the model before the round and for that of every source."""
        tightness = records["tightness"].get("tightness")
        if (
            tightness is None
            or tightness.shape != (len(server.updates) + 1,)
            or tightness.dtype != np.float64
            or (tightness < 0).any()
        ):
            return f"it is not {len(server.updates) + 1} numbers of at least 0"
        return ""

    def weigh(self, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
        """alpha by client; it is recorded together with I."""
        names = [update.client for update in updates]
        answer = server.answers.get(self.phase)
        if len(names) == 1:
            alpha = np.ones(1)
        elif answer is None:
            last = np.array([server.state.get("alpha", {}).get(name, 0.0) for name in names])
            alpha = last / last.sum() if last.sum() > 0 else np.full(len(names), 1 / len(names))
        else:
            tightness = answer["tightness"]["tightness"]
            for name, value in zip(["", *names], tightness, strict=True):
                server.detail(name, "tightness", "", float(value))
            alpha = attention(tightness, self.att, self.att_temp)
        weights = dict(zip(names, map(float, alpha), strict=True))
        server.state["alpha"] = {**server.state.get("alpha", {}), **weights}
        return weights
