"""The section of the report with the metrics that are computed from predictions, beside accuracy."""

from fedsim.results import markup
from fedsim.results.cell_texts import CellText, accuracy_cells, percent, shown_label
from fedsim.results.compare import Comparison, compare
from fedsim.results.confusion import kept_predictions
from fedsim.results.markup import Data
from fedsim.results.metrics import METRICS, per_class_accuracy
from fedsim.results.plots import run_labels
from fedsim.results.predictions import Predictions, pooled, read_predictions
from fedsim.results.reading import Runs


def more_than_accuracy(runs: Runs, comparison: Comparison, by: list[str]) -> str:
    """HTML of every metric of the kept predictions per method, and of the accuracy of each class.

    It is empty without predictions.
    """
    kept = kept_predictions(runs, run_labels(runs), comparison.select)
    if not kept:
        return ""
    names = [name for name, metric in METRICS.items() if metric.read is read_predictions and not metric.primary]
    tables = {name: compare(runs, comparison.select, None, by, published=False, metric=name) for name in names}
    cells = {name: accuracy_cells(table) for name, table in tables.items()}
    rows = [
        [shown_label(row), *(accuracy_data(cells[name][row["label"]]["average"]) for name in names)]
        for _, row in comparison.methods.iterrows()
    ]
    text = "<h3>More than accuracy</h3>" + markup.table(["Method", *(METRICS[name].title for name in names)], rows)
    text += markup.bullets(
        [
            "In %, averages over the targets, mean ± std over seeds. Less is better in expected calibration error.",
            *(note for note in tables[names[0]].notes if note.startswith(("Missing", "Not computed"))),
        ]
    )
    return text + markup.folded("Accuracy of each class", _class_accuracies(kept))


def _class_accuracies(kept: dict[str, dict[str, Predictions]]) -> str:
    """Recall of every class, pooled over targets and seeds."""
    whole = {label: pooled(list(by_target.values())) for label, by_target in kept.items()}
    classes = next(iter(whole.values())).classes
    rows = [
        [label, *(Data(percent(value), float(value)) for value in per_class_accuracy(predictions))]
        for label, predictions in whole.items()
    ]
    return markup.table(["Method", *classes], rows)


def accuracy_data(cell: CellText) -> Data:
    """A report's cell: mean ± spread. It is sorted by the mean; the first and second place of a column are marked."""
    text = f"{cell.mean} ± {cell.std}" if cell.std else cell.mean
    value = float(cell.mean) if cell.mean[0].isdigit() else float("nan")
    return Data(text, value, {0: "", 1: "first", 2: "second"}[cell.place])
