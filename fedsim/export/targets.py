"""Evaluates a trained model of a task without classes: a regression, or several labels."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from fedsim.common.measures import (
    area_under_roc,
    explained_variance,
    mean_absolute_error,
    root_mean_squared_error,
)
from fedsim.export.trained import TrainedModel, tensors_of
from fedsim.models.tasks import mean_of_defined

Measures = dict[str, str | int | float]
Evaluation = tuple[pd.DataFrame, pd.DataFrame]  # (metrics of each domain, predictions of its examples)


@torch.inference_mode()
def evaluate_targets(
    model: TrainedModel,
    domain: str,
    values: np.ndarray,
    targets: np.ndarray,
    indices: np.ndarray,
    names: Sequence[str] = (),
) -> Evaluation:
    """Returns (metrics, predictions) of the examples of a domain with targets [N, Q]; only `indices` are evaluated.

    The metrics are the mean absolute error, RMSE and R2, or the mean AUROC and that of each label; NaN is undefined.
    The predictions call an example DOMAIN[INDEX], or as `names` [N] do.
    """
    indices = model.ordered(indices)
    batches = list(tensors_of(values, indices, model.batch_size))
    if model.inference_rule.transductive:
        model.adapt(batches)
    predicted = np.concatenate([model.outputs(batch) for batch in batches])
    truth = targets[indices]
    table = pd.DataFrame({"domain": domain, "image": names_of_examples(domain, indices, names)})
    for place, name in enumerate(model.classes):
        table[f"{name} (truth)"] = truth[:, place]
        table[name] = predicted[:, place]
    return pd.DataFrame([measures_of_targets(model, domain, table)]), table


def names_of_examples(domain: str, indices: np.ndarray, names: Sequence[str]) -> list[str]:
    """What the examples are called in the predictions: DOMAIN[INDEX], or as `names` of all examples do."""
    if names:
        return [names[index] for index in indices]
    return [f"{domain}[{index}]" for index in indices]


def measures_of_targets(model: TrainedModel, domain: str, table: pd.DataFrame) -> Measures:
    """The row of metrics of a table of predictions that `evaluate_targets` made, or of several below each other."""
    truth = table[[f"{name} (truth)" for name in model.classes]].to_numpy()
    predicted = table[list(model.classes)].to_numpy()
    if model.is_regression:
        measures = measures_of_numbers(truth, predicted)
    else:
        measures = measures_of_labels(truth, predicted, model.classes)
    return {"domain": domain, "images": len(table), **measures}


def measures_of_numbers(truth: np.ndarray, predicted: np.ndarray) -> Measures:
    """The metrics of a regression in the user's unit; R2 has no unit."""
    return {
        "mae": mean_absolute_error(truth, predicted),
        "rmse": root_mean_squared_error(truth, predicted),
        "r2": explained_variance(truth, predicted),
    }


def measures_of_labels(truth: np.ndarray, predicted: np.ndarray, names: tuple[str, ...]) -> Measures:
    """The mean AUROC over the labels that have one, and the AUROC of each."""
    areas = {}
    for place, name in enumerate(names):
        is_positive = truth[:, place] == 1
        areas[f"auroc of {name}"] = area_under_roc(predicted[:, place], is_positive)
    return {"mean_auroc": mean_of_defined(list(areas.values())), **areas}
