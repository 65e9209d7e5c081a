"""PLAN's server part: the prompts of the clients are put side by side, not averaged."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.models.inserts.prompt_sets import ROWS
from fedsim.parts.facts import Fact
from strategies.parts import ArrayDict, Arrays, Refine, ServerRound


@dataclass(frozen=True)
class OwnRows(Refine):
    """P[k] = the row that client k sent, or the one before where it sent none; all other tensors stay as they are.

    Source: PLAN (Gong et al. 2024, arXiv 2411.10063). The rows are those of the insert
    `prompt_sets`, in the order of the clients. Robust fusions are refused, because a row that a client sent cannot be
    left out. The server's steps come before and move the other tensors alone, so that no momentum moves the row of a
    client that sent nothing. What trains or averages the new model comes after.
    """

    order: ClassVar[int] = 2
    belongs_to: ClassVar[str] = "prompt_sets"
    assumes = (Fact.SEVERAL_CLIENTS, Fact.SINGLE_UPDATES, Fact.EVERY_CLIENT)

    def refine(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """The tensors with the clients' own rows."""
        rows = {name: np.array(server.previous[name]) for name in ROWS}
        for update in server.updates:
            number = server.clients.index(update.client)
            for name, array in rows.items():
                array[number] = update.arrays[name][number]
        return {**fused, **rows}
