"""What a client measures of a model on its validation split, also where another metric than the task's selects."""

import math
from typing import Protocol

import numpy as np
import torch

from clients.local_data import LocalData
from fedsim.common.measures import of_classes
from fedsim.common.tasks import OF_CLASSES, SOURCE_TEST
from fedsim.models.net import Net
from fedsim.models.tasks import Labelled, Predict, defined, mean_of_defined
from fedsim.settings import RunSettings


class Validating(Protocol):
    """A client that validates the network that it shares."""

    data: LocalData

    @property
    def net(self) -> Net:
        """The network."""

    def examine(self, predict: Predict | None = None) -> tuple[float, float, dict[str, float]]:
        """(primary metric, loss, further numbers) on the validation split; the network is in eval mode afterwards."""


def validation(
    client: Validating, run: RunSettings, predict: Predict | None = None
) -> tuple[dict[str, float], float, float]:
    """({metric: value}, loss, primary metric) of the present network on the validation split.

    The metrics are the primary one, what the task measures besides it and, where `run.select_by` names a metric of
    classes, this one. It costs a second pass over the images, and is the mean over the domains on whose images it is
    defined. A metric that is defined on none is left out; the primary metric is then NaN.
    """
    score, loss, further = client.examine(predict)
    metrics = defined({client.data.task.metric: score, **further})
    if run.select_by in OF_CLASSES and run.select_by != client.data.task.metric:
        values = []
        for group in client.data.validation_by_domain:
            batches = client.data.evaluation(group, run.evaluate_batch_size)
            value = of_classes(run.select_by, *predicted_classes(predict or client.net, batches))
            if not math.isnan(value):
                values.append(value)
        if values:
            metrics[run.select_by] = float(np.mean(values))
    return metrics, loss, score


def source_test(client: Validating, run: RunSettings, predict: Predict | None = None) -> dict[str, float]:
    """The primary metric of the present network on the client's images of `data.source_test`, which select nothing.

    It is the mean over the domains on whose images it is defined; empty without such images.
    """
    data = client.data
    results = [
        data.task.examine(predict or client.net, data.evaluation(group, run.evaluate_batch_size))
        for group in data.test_by_domain
    ]
    if not results:
        return {}
    return defined({SOURCE_TEST + data.task.metric: mean_of_defined([result.value for result in results])})


def local_validation(client: Validating, run: RunSettings) -> dict[str, float]:
    """The metrics that select a round by the local models, under the names of a reply; the loss too where it does."""
    measured, loss, _ = validation(client, run)
    metrics = {name: measured[name] for name in (client.data.task.metric, run.select_by) if name in measured}
    if run.select_by == "loss":
        metrics["loss"] = loss
    return {f"local_validation_{name}": value for name, value in metrics.items()}


def predicted_classes(predict: Predict, batches: Labelled) -> tuple[np.ndarray, np.ndarray]:
    """([N] labels, [N, classes] probabilities) of labelled batches."""
    return predicted_logits(lambda images: predict(images).float().softmax(dim=1), batches)


@torch.inference_mode()
def predicted_logits(predict: Predict, batches: Labelled) -> tuple[np.ndarray, np.ndarray]:
    """([N] labels, [N, classes] logits, float32) of labelled batches."""
    labels, logits = [], []
    for images, truth in batches:
        labels.append(truth.cpu().numpy())
        logits.append(predict(images).float().cpu().numpy())
    return np.concatenate(labels), np.concatenate(logits)
