"""The client's half of generalization adjustment: by how much its own model fits its data better than the global."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from clients.parts import LocalRound, Report
from fedsim.common.seeding import numpy_rng
from fedsim.common.tasks import ANY_TASK, BY_METRIC
from fedsim.models.tasks import EVALUATION_BATCH
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Only, Size


@dataclass(frozen=True)
class GeneralizationGap(Report):
    """gap = E_k(theta) - E_k(theta_k): the risk of the received global model minus that of the last local model.

    Source: FedDG-GA (CVPR 2023). The client keeps one scalar between rounds. In its first round, and when a risk is not
    finite, `gap_valid` and the gap are 0. Both evaluations use the same examples without augmentation.

    metric: `train_loss` (the paper; default), `validation_accuracy` (the released code; there the gap is the
    local minus the global accuracy, so that a large gap raises the weight as well), or `validation_loss`
    max_samples: the size of a fixed random subset of the training examples; 0 takes all
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    metric: Literal["train_loss", "validation_loss", "validation_accuracy"] = "train_loss"
    max_samples: Annotated[int, Field(ge=0), Only(Size.CLIENT_IMAGES, metric="train_loss")] = 0
    assumes = (Fact.WHOLE_MODEL,)
    columns: ClassVar[tuple[str, ...]] = ("gap", "gap_valid")

    def before(self, round: LocalRound) -> dict[str, float]:
        """The gap of the received model."""
        stored = round.store.get_number("local_risk")
        if stored is None:
            return {"gap": 0.0, "gap_valid": 0}
        gap = self._risk(round) - stored
        return {"gap": gap, "gap_valid": 1} if math.isfinite(gap) else {"gap": 0.0, "gap_valid": 0}

    def after(self, round: LocalRound) -> dict[str, float]:
        """Stores the risk of the trained model."""
        round.store.put_number("local_risk", self._risk(round))
        return {}

    def _risk(self, round: LocalRound) -> float:
        """The mean loss on training or validation examples, or 1 - validation accuracy, of the present network.

        Where less of the task's metric is better, the metric itself takes the place of 1 - accuracy.
        """
        data = round.data
        positions = self._training_subset(round) if self.metric == "train_loss" else data.validation
        round.net.eval()
        score, loss, _ = round.task.measure(round.net, data.evaluation(positions, EVALUATION_BATCH))
        if self.metric != "validation_accuracy":
            return loss
        return score if BY_METRIC[round.task.metric].less_is_better else 1.0 - score

    def _training_subset(self, round: LocalRound) -> np.ndarray:
        positions = round.data.training_positions()
        if not self.max_samples or len(positions) <= self.max_samples:
            return positions
        # The same subset in every round: the stored risk and the new one must be of the same examples.
        rng = numpy_rng(round.seed, "gap-sample", round.client)
        return np.sort(rng.choice(positions, self.max_samples, replace=False))
