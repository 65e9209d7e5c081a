"""The commands of a trained model: `evaluate`, `predict`, `export`, `features`. Slow imports are inside them."""

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(help="folder of one run, e.g. outputs/pacs/fedavg/sketch/seed0")]
Which = Annotated[str, typer.Option(help="best, last, or another model file of the run, e.g. personal-photo")]


def evaluate(
    run: RunFolder,
    data: Annotated[
        Path | None,
        typer.Option(help="folder of images, CLASS/IMAGE or DOMAIN/CLASS/IMAGE (default: the run's target)"),
    ] = None,
    which: Which = "best",
    output: Annotated[Path | None, typer.Option(help="CSV file of all predictions")] = None,
) -> None:
    """Evaluate a run's model on labelled images: accuracy, balanced accuracy and macro F1 per domain."""
    from fedsim.export.verbs import show_evaluation

    show_evaluation(run, data, which, output)


def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="image files")],
    which: Which = "best",
    output: Annotated[Path | None, typer.Option(help="CSV file with the probabilities of all classes")] = None,
) -> None:
    """Predict the classes of image files with a run's model."""
    from fedsim.export.verbs import show_predictions

    show_predictions(run, images, which, output)


def export(
    run: RunFolder,
    format: Annotated[str, typer.Option(help="onnx, or torch (a program of torch.export)")] = "onnx",
    which: Which = "best",
    output: Annotated[Path | None, typer.Option(help="file to write (default: RUN/WHICH.onnx or .pt2)")] = None,
) -> None:
    """Write a run's model for other programs, checked on real images, together with a card."""
    from fedsim.export.verbs import write_export

    write_export(run, format, which, output)


def features(
    run: Annotated[Path, typer.Argument(help="folder of one run, e.g. outputs/digits/fedavg/rot75/seed0")],
    output: Annotated[Path | None, typer.Option(help="folder of the pictures (default: RUN/plots)")] = None,
    per_domain: Annotated[int, typer.Option(min=5, help="images of each domain")] = 200,
) -> None:
    """Draw the t-SNE of a run's features by class and by domain."""
    from fedsim.common.console import errors, say
    from fedsim.export.features import plot_features
    from fedsim.results.kept_model import unfinished

    if note := unfinished(run):
        errors.print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)
    png, _ = plot_features(run, output or run / "plots", per_domain)
    say(f"{png} (and .svg)")
