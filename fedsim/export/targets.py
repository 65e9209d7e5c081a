"""Evaluates a trained model of a task without classes: a regression, or several labels."""

import numpy as np
import pandas as pd
import torch

from fedsim.common.measures import (
    area_under_roc,
    explained_variance,
    mean_absolute_error,
    root_mean_squared_error,
)
from fedsim.common.tasks import REGRESSION
from fedsim.export.trained import TrainedModel
from fedsim.models.tasks import mean_of_defined

Measures = dict[str, str | int | float]


@torch.inference_mode()
def evaluate_targets(
    model: TrainedModel, domain: str, values: np.ndarray, targets: np.ndarray, indices: np.ndarray
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(metrics, predictions) of the examples of a domain that have targets [N, Q]; only `indices` are evaluated.

    The metrics are the mean absolute error, RMSE and R2, or the mean AUROC and that of each label; NaN is undefined.
    """
    batches = []
    for start in range(0, len(indices), model.batch_size):
        part = indices[start : start + model.batch_size]
        batches.append(torch.from_numpy(np.ascontiguousarray(values[part])))
    if model.plan.recipe.infer.transductive:
        model.adapt(batches)
    predicted = np.concatenate([model.outputs(batch) for batch in batches])
    truth = targets[indices]
    table = pd.DataFrame({"domain": domain, "image": [f"{domain}[{index}]" for index in indices]})
    for place, name in enumerate(model.classes):
        table[f"{name} (truth)"] = truth[:, place]
        table[name] = predicted[:, place]
    measures = measures_of_numbers if model.plan.data.task == REGRESSION.name else measures_of_labels
    row = {"domain": domain, "images": len(table), **measures(truth, predicted, model.classes)}
    return pd.DataFrame([row]), table


def measures_of_numbers(truth: np.ndarray, predicted: np.ndarray, names: tuple[str, ...]) -> Measures:
    """The metrics of a regression, in the user's unit; R2 has none."""
    return {
        "mae": mean_absolute_error(truth, predicted),
        "rmse": root_mean_squared_error(truth, predicted),
        "r2": explained_variance(truth, predicted),
    }


def measures_of_labels(truth: np.ndarray, predicted: np.ndarray, names: tuple[str, ...]) -> Measures:
    """The mean AUROC over the labels that have one, and the AUROC of each."""
    areas = {}
    for place, name in enumerate(names):
        areas[f"auroc of {name}"] = area_under_roc(predicted[:, place], truth[:, place] == 1)
    return {"mean_auroc": mean_of_defined(list(areas.values())), **areas}
