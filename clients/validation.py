"""What a client measures of a model on its validation split, also where another metric than the task's selects."""

import math
from typing import Protocol

import numpy as np
import torch

from clients.local_data import LocalData
from fedsim.common.class_metrics import of_classes
from fedsim.common.tasks import OF_CLASSES
from fedsim.models.net import Net
from fedsim.models.tasks import Labelled, Predict
from fedsim.settings import RunSettings


class Validating(Protocol):
    """A client that validates the network that it shares."""

    data: LocalData

    @property
    def net(self) -> Net:
        """The network."""

    def validate(self, predict: Predict | None = None) -> tuple[float, float]:
        """(primary metric, loss) on the validation split, after which the network is in eval mode."""


def validation(client: Validating, run: RunSettings, predict: Predict | None = None) -> tuple[dict[str, float], float]:
    """({metric: value}, loss) of the present network on the validation split.

    The metrics are the primary one and, where `run.select_by` names a metric of classes, this one. It costs a second
    pass over the images, and is the mean over the domains on whose images it is defined; where it is defined on none,
    it is left out.
    """
    score, loss = client.validate(predict)
    metrics = {client.data.task.metric: score}
    if run.select_by in OF_CLASSES:
        values = []
        for group in client.data.validation_by_domain:
            batches = client.data.evaluation(group, run.evaluate_batch_size)
            value = of_classes(run.select_by, *predicted_classes(predict or client.net, batches))
            if not math.isnan(value):
                values.append(value)
        if values:
            metrics[run.select_by] = float(np.mean(values))
    return metrics, loss


def local_validation(client: Validating, run: RunSettings) -> dict[str, float]:
    """The metrics that select a round by the local models, under the names of a reply; the loss too where it does."""
    metrics, loss = validation(client, run)
    if run.select_by == "loss":
        metrics["loss"] = loss
    return {f"local_validation_{name}": value for name, value in metrics.items()}


@torch.inference_mode()
def predicted_classes(predict: Predict, batches: Labelled) -> tuple[np.ndarray, np.ndarray]:
    """([N] labels, [N, classes] probabilities) of labelled batches."""
    labels, probabilities = [], []
    for images, truth in batches:
        labels.append(truth.cpu().numpy())
        probabilities.append(predict(images).float().softmax(dim=1).cpu().numpy())
    return np.concatenate(labels), np.concatenate(probabilities)
