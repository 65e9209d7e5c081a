"""FADA's third exchange: the target's client trains the backbone of the fused model and returns its features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from strategies.banks.checks import misfit
from strategies.parts import Arrays, ServerRound, Visit

BACKBONE = "backbone."


@dataclass(frozen=True)
class TargetTraining(Visit):
    """G becomes what the target's client trained against the sources' domain identifiers; its features fill a bank.

    Source: FADA (Peng et al., ICLR 2020). Identifiers are sent from the round on in which they were trained, that is,
    when clients had features of the target. When the target's client does not answer, the fused model and the features
    stay as they are.
    """

    phase: ClassVar[str] = "adapt"
    moment: ClassVar[Literal["updates", "model"]] = "model"
    records: ClassVar[tuple[str, ...]] = ("generator", "target_features")
    bank: ClassVar[str] = "target_features"
    requires: ClassVar[dict[str, str]] = {"banks": "target_features"}

    def ask(self, model: Arrays, server: ServerRound) -> Mapping[str, Arrays]:
        """The fused model and the identifiers of all sources."""
        trained = server.banks.get("domain_identifier", {})
        identifiers = {f"identifier:{name}": trained[name] for name in sorted(trained)}
        return {"arrays": {**server.previous, **model}, **identifiers}

    def accept(self, records: Mapping[str, Arrays], server: ServerRound) -> str:
        """Refuses records other than the backbone of the model with a matrix of features."""
        like = {name: array for name, array in server.previous.items() if name.startswith(BACKBONE)}
        if reason := misfit(records["generator"], like):
            return f"generator: {reason}"
        features = records[self.bank].get(self.bank)
        if features is None or features.ndim != 2 or features.dtype != np.float32 or not features.size:
            return "target_features is not a float32 matrix"
        negative = [name for name in like if name.endswith("running_var") and (records["generator"][name] < 0).any()]
        return f"{negative[0]!r} is negative somewhere" if negative else ""

    def take(self, records: Mapping[str, Arrays], model: Arrays, server: ServerRound) -> Arrays:
        """The model with the target's backbone; tensors that clients keep to themselves keep their fused values."""
        return {**model, **{name: np.array(value) for name, value in records["generator"].items() if name in model}}
