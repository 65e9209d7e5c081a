"""The commands of a trained model: `evaluate`, `predict`, `export`, `features`. Slow imports are inside them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsim.common.console import console, errors, say
from fedsim.common.errors import UserError, printable
from fedsim.common.files import atomic_write
from fedsim.common.tasks import BINARY, TASKS
from fedsim.settings.run import NO_TARGET

if TYPE_CHECKING:
    import pandas as pd

    from fedsim.export.targets import Evaluation
    from fedsim.export.trained import TrainedModel

RunFolder = Annotated[Path, typer.Argument(help="folder of one run, e.g. outputs/pacs/fedavg/sketch/seed0")]
Which = Annotated[str, typer.Option(help="best, last, or another model file of the run, e.g. personal-photo")]
Trust = Annotated[bool, typer.Option("--trust", help="run the code of modules outside fedsim that the folder names")]
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
SHOWN = 200  # so many predictions are printed at most


def evaluate(
    run: RunFolder,
    data: Annotated[
        Path | None,
        typer.Option(
            help="folder of images, CLASS/IMAGE or DOMAIN/CLASS/IMAGE; for a model of tables or arrays, a file of "
            "labelled rows with the run's columns (default: the run's target)"
        ),
    ] = None,
    which: Which = "best",
    trust: Trust = False,
    output: Annotated[Path | None, typer.Option(help="CSV file of all predictions")] = None,
) -> None:
    """Evaluate a run's model on labelled images or rows: the metrics of its task per domain."""
    from rich.markup import escape
    from rich.table import Table

    from fedsim.export import inference

    model = _model(run, which, trust)
    if data is None:
        measures, predictions = _of_target(model)
    elif model.plan.data.images:
        measures, predictions = inference.evaluate(model, inference.labelled_images(data, model.classes))
    else:
        measures, predictions = inference.evaluate_rows(model, data)
        _note_cells(model, [data])
    titles = measures.rename(columns={"images": model.plan.data.unit}).columns
    headings = [title.replace("_", " ") for title in titles]
    table = Table(*headings, title=escape(f"{run} ({which})"))
    task = TASKS[model.plan.data.task]
    for domain, count, *values in measures.itertuples(index=False):
        cells = [task.text(value) for value in values]
        table.add_row(escape(str(domain)), str(count), *cells)
    console.print(table)
    _write(predictions, output)


def _of_target(model: "TrainedModel") -> "Evaluation":
    """Returns (metrics, predictions) of the run's unseen domain, as the data set has it now."""
    from fedsim.data import load_target, load_target_masks
    from fedsim.export.inference import evaluate_arrays
    from fedsim.export.targets import evaluate_targets
    from fedsim.export.trained import other_images, refuse_other_data

    data = model.experiment.data
    target = model.experiment.run.target
    if target == NO_TARGET:
        raise UserError("this run left no domain out, so that it has no unseen one; name other data with --data")
    refuse_other_data(model.plan)
    images, labels, indices = load_target(data, target)
    _note(other_images(model))
    targets = None
    if model.has_targets:
        targets = load_target_masks(data, target)
    if targets is None:
        return evaluate_arrays(model, target, images, labels, indices)
    return evaluate_targets(model, target, images, targets, indices)


def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="image files, or tables of rows without labels")],
    which: Which = "best",
    trust: Trust = False,
    output: Annotated[Path | None, typer.Option(help="CSV file with the probabilities of all classes")] = None,
) -> None:
    """Predict the classes of image files, or of rows of tables, with a run's model."""
    from rich.markup import escape
    from rich.table import Table

    from fedsim.export import inference

    model = _model(run, which, trust)
    predictions = inference.predict(model, images)
    _note_cells(model, images)
    if model.doubt:
        _note(model.doubt.remark)
    headings = ["image" if model.plan.data.images else "row", *_headings(model)]
    table = Table(*map(escape, headings))
    for row in predictions.head(SHOWN).itertuples(index=False):
        cells = [row[0], *_cells(model, row)]
        table.add_row(*map(escape, cells))
    console.print(table)
    if len(predictions) > SHOWN:
        console.print(f"and {len(predictions) - SHOWN} more; --output writes them all")
    _write(predictions, output)


def _headings(model: "TrainedModel") -> list[str]:
    """The headings of the cells of a predicted example."""
    if model.has_targets:
        return list(model.classes)
    headings = ["class", "probability"]
    if model.plan.data.task == BINARY.name:
        headings.append(f"p({model.classes[1]})")
    if model.doubt:
        share = 100 * (1 - model.doubt.alpha)
        headings += ["calibrated", f"set ({share:g} %)"]
    return headings


def _cells(model: "TrainedModel", row: Any) -> list[str]:
    """The cells of a predicted example: its targets, or its class and how sure that is."""
    if model.has_targets:
        return [f"{value:.4g}" for value in row[1:]]
    cells = [row.predicted, f"{100 * row.probability:.1f} %"]
    if model.plan.data.task == BINARY.name:
        cells.append(f"{100 * row[-1]:.1f} %")  # of the second class, the positive one
    if model.doubt:
        cells += [f"{100 * row.probability_calibrated:.1f} %", row.set]
    return cells


def export(
    run: RunFolder,
    format: Annotated[str, typer.Option(help="onnx, or torch (a program of torch.export)")] = "onnx",
    which: Which = "best",
    trust: Trust = False,
    output: Annotated[Path | None, typer.Option(help="file to write (default: RUN/WHICH.onnx or .pt2)")] = None,
) -> None:
    """Write a run's model for other programs, checked on real images, together with a card."""
    from fedsim.export import files
    from fedsim.export.card import card

    model = _model(run, which, trust)
    file = output or run / f"{which}{SUFFIXES.get(format, '')}"
    text = card(model)  # before the model is written, because it reads records that may be damaged
    worst, source = files.export(model, format, file)
    beside = file.with_name(f"{file.stem}-card.md")
    atomic_write(beside, printable(text))
    say(f"{file}: logits differ from the original's by at most {worst:.1e} on {source}")
    say(f"card: {beside}")


def features(
    run: Annotated[Path, typer.Argument(help="folder of one run, e.g. outputs/digits/fedavg/rot75/seed0")],
    output: Annotated[Path | None, typer.Option(help="folder of the pictures (default: RUN/plots)")] = None,
    per_domain: Annotated[int, typer.Option(min=5, help="images of each domain")] = 200,
    trust: Trust = False,
) -> None:
    """Draw the t-SNE of a run's features by class and by domain."""
    from fedsim.export.features import plot_features
    from fedsim.records.reading import unfinished

    _note(unfinished(run))
    png, _ = plot_features(run, output or run / "plots", per_domain, trust)
    say(f"{png} (and .svg)")


def _model(run: Path, which: str, trust: bool) -> "TrainedModel":
    """Loads the run's model, and prints what is to be known about its file."""
    from fedsim.export.trained import load_trained

    model = load_trained(run, which, trust)
    _note(model.remark)
    return model


def _note(text: str) -> None:
    """Prints a note on the error stream, unless it is empty."""
    if text:
        errors.print(f"note: {text}", soft_wrap=True, markup=False, highlight=False)


def _note_cells(model: "TrainedModel", files: Sequence[Path]) -> None:
    """Prints a note for each cell of tables that the model does not know as it is written."""
    from fedsim.data.feature_tables import cell_notes

    if not model.plan.data.features:
        return
    for file in files:
        if file.suffix.lower() != ".npz":
            for text in cell_notes(file, model.experiment.data, model.plan.data, model.feature_scale):
                _note(text)


def _write(table: "pd.DataFrame", output: Path | None) -> None:
    """Writes predictions to a CSV file where one is named."""
    if output is not None:
        atomic_write(output, printable(table.to_csv(index=False)))
        say(f"predictions: {output}")
