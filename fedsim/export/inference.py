"""Applies a trained model to the images of a folder, or the rows of a table: predictions, and metrics of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from fedsim.common.errors import UserError, nearest
from fedsim.common.measures import area_under_roc, average_precision
from fedsim.common.tasks import BINARY
from fedsim.data.arrays import read_labelled
from fedsim.data.feature_tables import encode, read_rows, text_of_names
from fedsim.data.folders import images_of, is_image, walk
from fedsim.data.names import matching, subfolders
from fedsim.data.scaling import scale_rule, scaled_by_site
from fedsim.data.text_table import FIRST_ROW
from fedsim.export.targets import Evaluation, Measures, evaluate_targets, measures_of_targets, names_of_examples
from fedsim.export.trained import TrainedModel, in_batches, softmax_of, tensors_of


@dataclass(frozen=True)
class Labelled:
    """The image files of one domain with their class indices."""

    domain: str
    files: list[Path]
    labels: np.ndarray


def labelled_images(folder: Path, classes: Sequence[str]) -> list[Labelled]:
    """Finds the images below FOLDER/CLASS or FOLDER/DOMAIN/CLASS, for the classes that the model knows.

    Hidden files and folders are left out and links are followed, as in training. A class without images is allowed.
    Raises UserError when no folder has the name of a class, when another folder lies in their place, and when a domain
    has images but no folder of a class. It also refuses a file of another kind, and a folder without images.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; name one that has a folder of images per class, or per domain and class")
    single = _domain(folder, folder.absolute().name, classes)
    below: dict[str, Labelled | None] = {}
    if single is None:
        for name in subfolders(folder):
            below[name] = _domain(folder / name, name, classes)
    domains = [domain for domain in (single, *below.values()) if domain and domain.files]
    if not domains:
        names = ", ".join(classes[:5])
        more = ", ..." if len(classes) > 5 else ""
        raise UserError(f"{folder} has no folder of images with the name of a class of the model ({names}{more})")
    for name, domain in below.items():
        if domain is None and _has_images(folder / name):
            raise UserError(f"{folder / name} has images, but no folder that is called like a class of the model; "
                            f"its classes are {', '.join(classes)}; rename its folders, or take it away")  # fmt: skip
    return domains


def _has_images(folder: Path) -> bool:
    """Whether there is an image in a folder or below it."""
    return any(is_image(name) for _, files in walk(folder) for name in files)


def _domain(folder: Path, name: str, classes: Sequence[str]) -> Labelled | None:
    """The labelled images of FOLDER/CLASS; None when no folder has the name of a class.

    Raises UserError when another folder lies next to those of classes.
    """
    matches = {subfolder: matching(subfolder, classes) for subfolder in subfolders(folder)}
    if not any(matches.values()):
        return None
    places: dict[str, int] = {}
    for subfolder, match in matches.items():
        if match is None:
            raise UserError(
                f"{folder / subfolder} is not called like a class of the model; its classes are {', '.join(classes)}"
            )
        places[subfolder] = classes.index(match)
    files: list[Path] = []
    labels: list[int] = []
    for subfolder, place in places.items():
        images = images_of(folder, subfolder)
        files += [folder / image for image in images]
        labels += [place] * len(images)
    return Labelled(name, files, np.array(labels, dtype=np.int64))


def predict(model: TrainedModel, files: Sequence[Path]) -> pd.DataFrame:
    """Predicts, with one row per image: its file, the predicted class, and the probability of every class.

    Where the examples are rows of tables, the files are tables with the columns of the run, without labels. With
    data.missing = 'drop' a row with an empty feature has no prediction, because no such row has trained.
    """
    if not model.has_targets:
        model.require_classes()
    if not model.plan.data.images:
        return pd.concat([_table_of_rows(model, file) for file in files], ignore_index=True)
    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        hint = "no such file"
        if Path(missing[0]).is_dir():
            hint = f"a folder; name its files, e.g. {missing[0]}/*"
        raise UserError(f"there is no image {missing[0]}: {hint}")
    return _table(model, list(files))


def evaluate(model: TrainedModel, data: Sequence[Labelled]) -> Evaluation:
    """Returns (metrics of each domain and of all unseen ones, predictions).

    The metrics are the accuracy, the balanced accuracy and the macro F1, as fractions. A domain whose name is that of
    one that trained or selected the model is marked, and is not in the row `all`. Balanced accuracy and macro F1 are
    means over the classes that occur in the labels. A transductive rule adapts to each domain separately, and one that
    depends on the order of the images gets them in a random order.
    """
    model.require_classes()
    tables = []
    for domain in data:
        table = _table(model, domain.files)
        _add_labels(model, table, domain.domain, domain.labels)
        tables.append((domain.domain, table))
    return _evaluated(model, tables)


def evaluate_rows(model: TrainedModel, file: Path) -> Evaluation:
    """Returns (metrics of each domain and of all unseen ones, predictions) of a file of labelled rows.

    `read_labelled` says what the file has.

    The metrics are those of the run's task, and domains are marked as `evaluate` marks them. With data.scale = 'site'
    every domain is standardized by its own rows. Raises UserError for a label that is no class of the run.
    """
    tables = []
    domains = read_labelled(file, model.experiment.data, model.plan.data)
    for domain, (examples, names) in domains.items():
        indices = np.arange(len(names))
        values = _scaled(model, examples.values, names)
        if model.has_targets:
            _, table = evaluate_targets(model, domain, values, examples.labels, indices, names)
        else:
            labels = _indices_of_classes(model, examples.labels, file)
            _, table = evaluate_arrays(model, domain, values, labels, indices, names)
        tables.append((domain, table))
    return _evaluated(model, tables)


def _indices_of_classes(model: TrainedModel, labels: np.ndarray, file: Path) -> np.ndarray:
    """The index of the class that each label [N] names; UserError for one that is no class of the model."""
    places = {name: index for index, name in enumerate(model.classes)}
    unknown = sorted(set(labels) - places.keys())
    if unknown:
        label = unknown[0]
        hint = f"{nearest(label, places)}its classes are {', '.join(places)}"
        raise UserError(f"{file}: the label {label!r} is no class of the model; {hint}")
    return np.array([places[name] for name in labels], np.int64)


def _evaluated(model: TrainedModel, tables: Sequence[tuple[str, pd.DataFrame]]) -> Evaluation:
    """Returns (metrics, predictions) of the domains below each other.

    The metrics are those of each domain, marked where the model has seen it, and of all unseen ones where there are
    several.

    tables: each domain with its predictions, in which labels or targets are
    """
    measures = measures_of_targets if model.has_targets else _measures
    rows = []
    unseen = []
    for domain, table in tables:
        mark = _mark(model, domain)
        rows.append(measures(model, domain + mark, table))
        if not mark:
            unseen.append(table)
    if len(unseen) > 1:
        rows.append(measures(model, "all", pd.concat(unseen, ignore_index=True)))
    predictions = pd.concat([table for _, table in tables], ignore_index=True)
    return pd.DataFrame(rows), predictions


def _mark(model: TrainedModel, domain: str) -> str:
    """What stands behind the name of a domain that the model has seen, in brackets; empty for an unseen one."""
    run = model.experiment.run
    name = matching(domain, model.plan.data.domains)
    if name is None or name == run.target:
        return ""
    if name == run.validation_domain:
        return " (selected the round)"
    return " (trained)"


@torch.inference_mode()
def evaluate_arrays(
    model: TrainedModel,
    domain: str,
    images: np.ndarray,
    labels: np.ndarray,
    indices: np.ndarray,
    names: Sequence[str] = (),
) -> Evaluation:
    """Evaluates a model on images uint8 [N, C, s, s] from a data set's reader; only `indices` are evaluated.

    Returns (metrics, predictions) with the columns of `evaluate`. The predictions call an example DOMAIN[INDEX], or as
    `names` [N] do.
    """
    model.require_classes()
    indices = model.ordered(indices)
    if model.inference_rule.transductive:
        model.adapt(tensors_of(images, indices, model.batch_size))
    batches = tensors_of(images, indices, model.batch_size)
    probabilities = np.concatenate([softmax_of(model(batch)) for batch in batches])
    table = _predictions(model, names_of_examples(domain, indices, names), probabilities)
    _add_labels(model, table, domain, labels[indices])
    return pd.DataFrame([_measures(model, domain, table)]), table


def _scaled(model: TrainedModel, values: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The values [N, ...] of a domain, standardized by themselves where data.scale = 'site'.

    Raises UserError, with the name of a row, for a missing value that nothing replaces, and for a row alone that would
    be standardized by itself.
    """
    bench = model.plan.data
    rule = scale_rule(model.experiment.data, bench)
    if rule == "site":
        if len(values) < 2:
            raise UserError(
                f"{names[0]}: with data.scale = 'site' rows are standardized by their own mean, which makes one row "
                "the same as any other; give it together with other rows of its site"
            )
        return scaled_by_site(values, np.arange(len(values)), bench)
    rows = values.reshape(len(values), -1)
    incomplete = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if rule == "none" and len(incomplete):
        raise UserError(
            f"{names[incomplete[0]]}: a cell is empty, and data.scale = 'none', with which the model was trained, "
            "gives it no value; fill it in, or leave the row out"
        )
    return values


def _add_labels(model: TrainedModel, table: pd.DataFrame, domain: str, labels: np.ndarray) -> None:
    """Inserts the domain and the names of the labels [N] into a table of predictions."""
    names = [model.classes[label] for label in labels]
    table.insert(0, "domain", domain)
    table.insert(2, "label", names)


def _measures(model: TrainedModel, domain: str, table: pd.DataFrame) -> Measures:
    """The row of metrics of predictions with their labels; those of ranks are in it where there are two classes."""
    from sklearn.metrics import f1_score, recall_score  # a fifth of the start of `predict`, which needs no measures

    label = table["label"]
    predicted = table["predicted"]
    over_classes = {"average": "macro", "labels": sorted(set(label)), "zero_division": 0}
    measures: Measures = {
        "domain": domain,
        "images": len(table),
        "accuracy": float((label == predicted).mean()),
        "balanced_accuracy": float(recall_score(label, predicted, **over_classes)),
        "macro_f1": float(f1_score(label, predicted, **over_classes)),
    }
    if model.plan.data.task == BINARY.name:
        name = model.classes[1]
        scores = table[f"p({name})"].to_numpy()
        positive = (label == name).to_numpy()
        measures["auroc"] = area_under_roc(scores, positive)
        measures["auprc"] = average_precision(scores, positive)
    return measures


def _table(model: TrainedModel, files: list[Path]) -> pd.DataFrame:
    """Predictions of image files, in their order; a rule that needs it first sees them, in the order that it needs."""
    order = model.ordered(np.arange(len(files)))
    ordered = [files[place] for place in order]
    if model.inference_rule.transductive:
        model.adapt(model.prepare(batch) for batch in in_batches(ordered, model.batch_size))
    probabilities = model.probabilities(ordered)
    names = [str(file) for file in files]
    return _predictions(model, names, probabilities[np.argsort(order)])


def _table_of_rows(model: TrainedModel, file: Path) -> pd.DataFrame:
    """Predictions of the rows of a table, called by the table and the row in it as an editor counts.

    As in `evaluate_rows`, a domain is standardized by its own rows with data.scale = 'site', and a transductive rule
    adapts to each domain separately. A table without a column of domains is one domain.
    Raises UserError for a row without a domain in a table where this matters.
    """
    data = model.experiment.data
    columns, table = read_rows(file, data, model.plan.data)
    rows = encode(table, columns, data.missing, str(file))
    domains = text_of_names(table[columns.domain]) if columns.domain in table else np.full(len(table), "")
    names = np.array([f"{file}, row {number + FIRST_ROW}" for number in table.rows], dtype=object)
    apart = scale_rule(model.experiment.data, model.plan.data) == "site" or model.inference_rule.transductive
    if not apart:
        domains = np.full(len(rows), "")
    present = sorted(set(domains))
    if "" in present[:-1]:
        row = names[domains == ""][0]
        raise UserError(f"{row}: its domain is empty, and others are not; name it, because the model looks at all "
                        "rows of a domain together")  # fmt: skip
    tables = []
    for domain in present:
        places = np.flatnonzero(domains == domain)
        table = _table_of_domain(model, rows[places], list(names[places]))
        tables.append(table.set_index(places))
    return pd.concat(tables).sort_index()


@torch.inference_mode()
def _table_of_domain(model: TrainedModel, rows: np.ndarray, names: list[str]) -> pd.DataFrame:
    """Predictions of the rows [N, D] of one domain, which are called `names` [N].

    The rows come in the order and in the batches of `evaluate_rows`, on which some rules depend.
    """
    values = _scaled(model, rows, names)
    order = model.ordered(np.arange(len(values)))
    if model.inference_rule.transductive:
        model.adapt(tensors_of(values, order, model.batch_size))
    batches = tensors_of(values, order, model.batch_size)
    places = np.argsort(order)
    if model.has_targets:
        outputs = np.concatenate([model.outputs(batch) for batch in batches])[places]
        columns = dict(zip(model.classes, outputs.T, strict=True))
        return pd.DataFrame({"image": names, **columns})
    probabilities = np.concatenate([softmax_of(model(batch)) for batch in batches])
    return _predictions(model, names, probabilities[places])


def _predictions(model: TrainedModel, images: list[str], probabilities: np.ndarray) -> pd.DataFrame:
    """The table of predictions from the probabilities [N, classes] of the images [N].

    Where the run has fitted its doubt, the table has the calibrated probability and the set of classes: `no | yes`.
    """
    best = probabilities.argmax(axis=1)
    rows = np.arange(len(best))
    table = pd.DataFrame(
        {
            "image": images,
            "predicted": [model.classes[index] for index in best],
            "probability": probabilities[rows, best],
        }
    )
    doubt = model.doubt
    if doubt:
        calibrated = doubt.calibrated(probabilities)
        sets = []
        for is_in_set in doubt.sets(calibrated):
            names = compress(model.classes, is_in_set)
            sets.append(" | ".join(names))
        table["probability_calibrated"] = calibrated[rows, best]
        table["set"] = sets
    columns = [f"p({name})" for name in model.classes]
    return pd.concat([table, pd.DataFrame(probabilities, columns=columns)], axis=1)
