"""The work of the commands `evaluate`, `predict` and `export`."""

from pathlib import Path

import pandas as pd
from rich.markup import escape
from rich.table import Table

from fedsim.common.console import console, errors, say
from fedsim.common.files import atomic_write
from fedsim.data import load_target
from fedsim.export.judge import evaluate, evaluate_arrays, labelled_images, predict
from fedsim.export.trained import TrainedModel, load_trained, other_images, refuse_other_classes

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
SHOWN = 200  # so many predictions are printed at most


def show_evaluation(run: Path, data: Path | None, which: str, output: Path | None) -> None:
    """Print the measures per domain, and write the predictions when a file is named."""
    model = _model(run, which)
    if data is None:
        target = model.experiment.run.target
        refuse_other_classes(model)
        images, labels, indices = load_target(model.experiment.data, target)
        if other := other_images(model):
            errors.print(f"note: {other}", soft_wrap=True, markup=False, highlight=False)
        measures, predictions = evaluate_arrays(model, target, images, labels, indices)
    else:
        measures, predictions = evaluate(model, labelled_images(data, model.classes))
    table = Table(*[column.replace("_", " ") for column in measures.columns], title=escape(f"{run} ({which})"))
    for row in measures.itertuples(index=False):
        table.add_row(escape(str(row[0])), str(row[1]), *(f"{100 * value:.1f} %" for value in row[2:]))
    console.print(table)
    _write(predictions, output)


def show_predictions(run: Path, images: list[Path], which: str, output: Path | None) -> None:
    """Print image, class and probability."""
    predictions = predict(_model(run, which), images)
    table = Table("image", "class", "probability")
    for row in predictions.head(SHOWN).itertuples(index=False):
        table.add_row(escape(row.image), escape(row.predicted), f"{100 * row.probability:.1f} %")
    console.print(table)
    if len(predictions) > SHOWN:
        console.print(f"and {len(predictions) - SHOWN} more; --output writes them all")
    _write(predictions, output)


def write_export(run: Path, format: str, which: str, output: Path | None) -> None:
    """Write the model file and its card."""
    from fedsim.export.card import card
    from fedsim.export.files import export

    model = _model(run, which)
    file = output or run / f"{which}{SUFFIXES.get(format, '')}"
    text = card(model)  # before the model is written, because it reads records that may be damaged
    worst, source = export(model, format, file)
    beside = file.with_name(f"{file.stem}-card.md")
    atomic_write(beside, text)
    say(f"{file}: logits differ from the original's by at most {worst:.1e} on {source}")
    say(f"card: {beside}")


def _model(run: Path, which: str) -> TrainedModel:
    """The run's model; what is to be known about its file is printed."""
    model = load_trained(run, which)
    if model.remark:
        errors.print(f"note: {model.remark}", soft_wrap=True, markup=False, highlight=False)
    return model


def _write(table: pd.DataFrame, output: Path | None) -> None:
    if output is not None:
        atomic_write(output, table.to_csv(index=False))
        say(f"predictions: {output}")
