"""Bulyan: Krum's selection, then a trimmed mean around the median of the selected models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import numpy as np
from pydantic import Field

from fedsim.parts.facts import Fact
from fedsim.settings.experiment import Experiment
from strategies.fuse.enough_clients import equal_columns, refuse_too_few
from strategies.fuse.krum import selected_by_krum
from strategies.fuse.trimmed_mean import trimmed_mean
from strategies.parts import ArrayDict, Fuse, ServerRound, Update
from strategies.tools.moves import moved, moves
from strategies.wire import flower_strategies as flower


@dataclass(frozen=True)
class Bulyan(Fuse):
    """S = the K - 2f models with the lowest Krum score; theta[i] = mean of the K - 4f values of S[i] near its median.

    Source: El Mhamdi et al., ICML 2018, by Flower's Bulyan, on the shared parameters. All other tensors take the
    coordinate-wise median of all clients. Weights are not used. The rule needs K >= 4 f + 3 clients: a round with fewer
    replies does not change the model, as in Flower. `malicious = 0` gives FedAvg with uniform weights for the
    parameters.

    malicious: f, the number of clients that may send anything
    """

    malicious: Annotated[int, Field(ge=0)] = 1
    assumes = (Fact.SEVERAL_CLIENTS, Fact.EVERY_ENTRY)
    breaks = (Fact.WEIGHTED_MEAN, Fact.CLIENT_WEIGHTS, Fact.EVERY_CLIENT)

    def check(self, experiment: Experiment) -> None:
        """Raises UserError when the federation is too small for that many malicious clients."""
        refuse_too_few(experiment, "bulyan", 4, self.malicious)

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """Parameters by Bulyan on the updates, the rest by the median. Every client has 1/K in its weight column."""
        states, deltas = [update.arrays for update in updates], moves(updates, server)
        selected = cache(lambda malicious, count: selected_by_krum(deltas, malicious, count))
        rule = flower.Bulyan(
            num_malicious_nodes=self.malicious,
            selection_rule=lambda contents, malicious, count: [contents[k] for k in selected(malicious, count)],
        )
        fused = {}
        for name in deltas[0]:  # one tensor after the other, because all models may be too large for the memory
            singles = [{name: delta[name]} for delta in deltas]
            aggregate = flower.aggregate(rule, server.round, singles, [{flower.WEIGHT: 1}] * len(updates))
            if aggregate is None:
                server.client_columns |= {update.client: {"weight": 0.0} for update in updates}
                return {name: np.array(server.previous[name]) for name in states[0]}
            fused[name] = moved(name, aggregate[name], server)
        equal_columns(updates, server)
        rest = [name for name in states[0] if name not in fused]
        fused |= trimmed_mean([{name: state[name] for name in rest} for state in states], (len(states) - 1) // 2)
        return {name: fused[name] for name in states[0]}
