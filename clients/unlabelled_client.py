"""The unseen domain's client in methods that adapt to it. It holds images without labels, and the server visits it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from clients.local_data import LocalData
from clients.local_round import LocalRound
from clients.optimizers import learning_rate
from clients.recipe import ClientRecipe
from clients.store import ClientStore
from clients.tools.networks import freeze, start_training
from fedsim.common.seeding import seed_library
from fedsim.common.values import Json
from fedsim.models.net import Net
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import load_arrays
from strategies.parts import Place


@dataclass(eq=False)
class UnlabelledClient:
    """Answers visits by the recipe's part `unlabelled`. It keeps nothing: every message brings a whole model."""

    experiment: Experiment
    recipe: ClientRecipe
    net: Net
    places: Mapping[str, Place]
    data: LocalData
    device: torch.device

    def __post_init__(self) -> None:
        self.frozen = freeze(self.net, self.places)

    def answer(
        self, records: Mapping[str, Mapping[str, np.ndarray]], config: Mapping[str, Json]
    ) -> dict[str, dict[str, np.ndarray]]:
        """The records of the answer to a visit. The records of the visit are `arrays` (the model) and others."""
        experiment, round, phase = self.experiment, config["round"], config["phase"]
        others = dict(records)
        arrays = others.pop("arrays")
        load_arrays(self.net, arrays, list(arrays))
        seed_library(experiment.run.seed, "library", config["client"], phase, round)
        start_training(self.net, self.frozen)
        local = LocalRound(
            client=config["client"],
            net=self.net,
            train=experiment.train,
            classes=self.data.classes,
            round=round,
            rounds=experiment.train.rounds,
            phase=phase,
            seed=experiment.run.seed,
            device=self.device,
            store=ClientStore(None),
            data=self.data,
            places=self.places,
            lr=learning_rate(experiment.train, round, experiment.train.rounds),
            records=others,
        )
        assert self.recipe.unlabelled is not None  # or nobody visits
        self.recipe.unlabelled.answer(local)
        return local.outbox
