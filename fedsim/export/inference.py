"""Applies a trained model to the images of a folder, or the rows of a table: predictions, and metrics of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from fedsim.common.errors import UserError, nearest
from fedsim.common.measures import area_under_roc, average_precision
from fedsim.common.seeding import numpy_rng
from fedsim.common.tasks import BINARY
from fedsim.data.arrays import read_labelled
from fedsim.data.feature_tables import read_rows
from fedsim.data.folders import images_of, is_image, walk
from fedsim.data.names import matching, subfolders
from fedsim.data.scaling import scale_rule, scaled_by_site
from fedsim.export.targets import evaluate_targets, measures_of_targets, names_of_examples
from fedsim.export.trained import TrainedModel


@dataclass(frozen=True)
class Labelled:
    """The image files of one domain with their class indices."""

    domain: str
    files: list[Path]
    labels: np.ndarray


def labelled_images(folder: Path, classes: Sequence[str]) -> list[Labelled]:
    """The images below FOLDER/CLASS or FOLDER/DOMAIN/CLASS, for the classes that the model knows.

    Hidden files and folders are left out and links are followed, as in training. A class without images is allowed.
    Raises UserError when no folder has the name of a class, when another folder lies beside class folders, and when a
    domain has images but no folder of a class. It also refuses a file of another kind, and a folder without images.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; name one that has a folder of images per class, or per domain and class")
    found = _domain(folder, folder.absolute().name, classes)
    below = {} if found else {name: _domain(folder / name, name, classes) for name in subfolders(folder)}
    kept = [domain for domain in (found, *below.values()) if domain is not None and domain.files]
    if not kept:
        raise UserError(f"{folder} has no folder of images with the name of a class of the model "
                        f"({', '.join(classes[:5])}{', ...' if len(classes) > 5 else ''})")  # fmt: skip
    left_out = [name for name, domain in below.items() if domain is None and _has_images(folder / name)]
    if left_out:
        raise UserError(f"{folder / left_out[0]} has images, but no folder that is called like a class of the model; "
                        f"its classes are {', '.join(classes)}; rename its folders, or take it away")  # fmt: skip
    return kept


def _has_images(folder: Path) -> bool:
    return any(is_image(name) for _, files in walk(folder) for name in files)


def _domain(folder: Path, name: str, classes: Sequence[str]) -> Labelled | None:
    """The labelled images of FOLDER/CLASS; None when no folder has the name of a class."""
    named = {sub: matching(sub, classes) for sub in subfolders(folder)}
    if not any(named.values()):
        return None
    unknown = [sub for sub, found in named.items() if found is None]
    if unknown:
        raise UserError(
            f"{folder / unknown[0]} is not called like a class of the model; its classes are {', '.join(classes)}"
        )
    files: list[Path] = []
    labels: list[int] = []
    for sub, found in named.items():
        inside = images_of(folder, sub)
        files += [folder / name for name in inside]
        labels += [list(classes).index(str(found))] * len(inside)
    return Labelled(name, files, np.array(labels, dtype=np.int64))


def predict(model: TrainedModel, files: Sequence[Path]) -> pd.DataFrame:
    """One row per image: its file, the predicted class, and the probability of every class.

    Where the examples are rows of tables, the files are tables with the columns of the run, without labels.
    """
    if not model.has_targets:
        model.require_classes()
    if not model.plan.data.images:
        return pd.concat([_table_of_rows(model, file) for file in files], ignore_index=True)
    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        hint = f"a folder; name its files, e.g. {missing[0]}/*" if Path(missing[0]).is_dir() else "no such file"
        raise UserError(f"there is no image {missing[0]}: {hint}")
    return _table(model, list(files))


def evaluate(model: TrainedModel, data: Sequence[Labelled]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(metrics of each domain and of all unseen ones, predictions): accuracy, balanced accuracy, macro F1 as fractions.

    A domain whose name is that of one that trained or selected the model is marked, and is not in the row `all`.
    Balanced accuracy and macro F1 are means over the classes that occur in the labels. A transductive rule adapts to
    each domain separately, and one that depends on the order of the images gets them in a random order.
    """
    model.require_classes()
    tables = []
    for domain in data:
        table = _table(model, domain.files)
        table.insert(0, "domain", domain.domain)
        table.insert(2, "label", [model.classes[label] for label in domain.labels])
        tables.append((domain.domain, table))
    return _measures_by_domain(model, tables), pd.concat([table for _, table in tables], ignore_index=True)


def evaluate_rows(model: TrainedModel, file: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(metrics of each domain and of all unseen ones, predictions) of a file of labelled rows; see `read_labelled`.

    The metrics are those of the run's task, and domains are marked as `evaluate` marks them. With data.scale = 'site'
    every domain is standardized by its own rows. Raises UserError for a label that is no class of the run.
    """
    data, bench = model.experiment.data, model.plan.data
    tables = []
    for domain, (examples, names) in read_labelled(file, data, bench).items():
        values, indices = examples.values, np.arange(len(names))
        if scale_rule(data, bench) == "site":
            values = scaled_by_site(values, indices, bench)
        if model.has_targets:
            _, table = evaluate_targets(model, domain, values, examples.labels, indices, names)
        else:
            labels = _indices_of_classes(model, examples.labels, file)
            _, table = evaluate_arrays(model, domain, values, labels, indices, names)
        tables.append((domain, table))
    return _measures_by_domain(model, tables), pd.concat([table for _, table in tables], ignore_index=True)


def _indices_of_classes(model: TrainedModel, labels: np.ndarray, file: Path) -> np.ndarray:
    """The index of the class that each label [N] names; UserError for one that is no class of the model."""
    places = {name: index for index, name in enumerate(model.classes)}
    unknown = sorted(set(labels) - places.keys())
    if unknown:
        raise UserError(f"{file}: the label {unknown[0]!r} is no class of the model; {nearest(unknown[0], places)}"
                        f"its classes are {', '.join(places)}")  # fmt: skip
    return np.array([places[name] for name in labels], np.int64)


def _measures_by_domain(model: TrainedModel, tables: Sequence[tuple[str, pd.DataFrame]]) -> pd.DataFrame:
    """The metrics of each domain, marked where the model has seen it, and of all unseen ones where there are several.

    tables: each domain with its predictions, in which labels or targets are
    """
    measures = measures_of_targets if model.has_targets else _measures
    rows, unseen = [], []
    for domain, table in tables:
        mark = _mark(model, domain)
        rows.append(measures(model, domain + mark, table))
        if not mark:
            unseen.append(table)
    if len(unseen) > 1:
        rows.append(measures(model, "all", pd.concat(unseen, ignore_index=True)))
    return pd.DataFrame(rows)


def _mark(model: TrainedModel, domain: str) -> str:
    """What stands behind the name of a domain that the model has seen, in brackets; empty for an unseen one."""
    bench, run = model.plan.data, model.experiment.run
    name = matching(domain, bench.domains)
    if name is None or name == run.target:
        return ""
    return " (selected the round)" if name == run.validation_domain else " (trained)"


@torch.inference_mode()
def evaluate_arrays(
    model: TrainedModel,
    domain: str,
    images: np.ndarray,
    labels: np.ndarray,
    indices: np.ndarray,
    names: Sequence[str] = (),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Like `evaluate`, for images uint8 [N, C, s, s] from a data set's reader; only `indices` are evaluated.

    The predictions call an example DOMAIN[INDEX], or as `names` [N] do.
    """
    model.require_classes()
    if model.plan.recipe.infer.shuffled:  # the same order as in the run
        indices = numpy_rng(model.experiment.run.seed, "test-order").permutation(indices)
    size = model.batch_size
    parts = [indices[start : start + size] for start in range(0, len(indices), size)]
    if model.plan.recipe.infer.transductive:
        model.adapt(torch.from_numpy(np.ascontiguousarray(images[part])) for part in parts)
    batches = (torch.from_numpy(np.ascontiguousarray(images[part])) for part in parts)
    probabilities = np.concatenate([model(batch).float().softmax(1).numpy() for batch in batches])
    table = _predictions(model, names_of_examples(domain, indices, names), probabilities)
    table.insert(0, "domain", domain)
    table.insert(2, "label", [model.classes[label] for label in labels[indices]])
    return pd.DataFrame([_measures(model, domain, table)]), table


def _measures(model: TrainedModel, domain: str, table: pd.DataFrame) -> dict[str, str | int | float]:
    from sklearn.metrics import f1_score, recall_score  # a fifth of the start of `predict`, which needs no measures

    label, predicted = table["label"], table["predicted"]
    over_classes = {"average": "macro", "labels": sorted(set(label)), "zero_division": 0}
    of_ranks = {}
    if model.plan.data.task == BINARY.name:
        name = model.classes[1]
        scores = table[f"p({name})"].to_numpy()
        positive = (label == name).to_numpy()
        of_ranks["auroc"] = area_under_roc(scores, positive)
        of_ranks["auprc"] = average_precision(scores, positive)
    return {
        "domain": domain,
        "images": len(table),
        "accuracy": float((label == predicted).mean()),
        "balanced_accuracy": float(recall_score(label, predicted, **over_classes)),
        "macro_f1": float(f1_score(label, predicted, **over_classes)),
        **of_ranks,
    }


def _table(model: TrainedModel, files: list[Path]) -> pd.DataFrame:
    """Predictions of image files, in their order; a rule that needs it first sees them, in the order that it needs."""
    rule, size = model.plan.recipe.infer, model.batch_size
    order = np.arange(len(files))
    if rule.shuffled:  # a folder lists its images class by class
        order = numpy_rng(model.experiment.run.seed, "test-order").permutation(order)
    seen = [files[place] for place in order]
    if rule.transductive:
        model.adapt(model.prepare(seen[start : start + size]) for start in range(0, len(seen), size))
    probabilities = model.probabilities(seen)
    return _predictions(model, [str(file) for file in files], probabilities[np.argsort(order)])


@torch.inference_mode()
def _table_of_rows(model: TrainedModel, file: Path) -> pd.DataFrame:
    """Predictions of the rows of a table, called by the table and the row in it as an editor counts."""
    values = read_rows(file, model.experiment.data, model.plan.data)
    if scale_rule(model.experiment.data, model.plan.data) == "site":
        values = scaled_by_site(values, np.arange(len(values)), model.plan.data)
    batch = torch.from_numpy(values)
    if model.plan.recipe.infer.transductive:
        model.adapt([batch])
    names = [f"{file}, row {number + 2}" for number in range(len(values))]
    if model.has_targets:
        columns = dict(zip(model.plan.data.outputs, model.outputs(batch).T, strict=True))
        return pd.DataFrame({"image": names, **columns})
    return _predictions(model, names, model(batch).float().softmax(1).numpy())


def _names(model: TrainedModel, is_in: np.ndarray) -> str:
    """The names of the classes in a set, given as bool [classes]: `no | yes`."""
    return " | ".join(name for name, chosen in zip(model.classes, is_in, strict=True) if chosen)


def _predictions(model: TrainedModel, images: list[str], probabilities: np.ndarray) -> pd.DataFrame:
    best = probabilities.argmax(axis=1)
    rows = np.arange(len(best))
    table = pd.DataFrame(
        {
            "image": images,
            "predicted": [model.classes[index] for index in best],
            "probability": probabilities[rows, best],
        }
    )
    if doubt := model.doubt:
        calibrated = doubt.calibrated(probabilities)
        table["probability_calibrated"] = calibrated[rows, best]
        table["set"] = [_names(model, row) for row in doubt.sets(calibrated)]
    return pd.concat([table, pd.DataFrame(probabilities, columns=[f"p({name})" for name in model.classes])], axis=1)
