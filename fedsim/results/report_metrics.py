"""The sections of a report on what the runs have kept: metrics of predictions, and the structures of segmentations."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedsim.common.tables import Cell, percent
from fedsim.results import markup
from fedsim.results.cases import STRUCTURE_QUANTITIES, Cases
from fedsim.results.compare import compare
from fedsim.results.comparison import Comparison, accuracy_cells, shown_label
from fedsim.results.markup import Data
from fedsim.results.metrics import METRICS, kept_predictions, per_class_accuracy
from fedsim.results.predictions import Predictions, pooled, read_predictions
from fedsim.results.reading import Runs
from fedsim.results.statistics import over_seeds


def more_than_accuracy(runs: Runs, comparison: Comparison, by: Sequence[str]) -> str:
    """HTML of every metric of the kept predictions per method, and of the accuracy of each class.

    It is empty without predictions.
    """
    kept = kept_predictions(runs, comparison.labels, comparison.select)
    if not kept:
        return ""
    names = [name for name, metric in METRICS.items() if metric.read is read_predictions and not metric.primary]
    tables = {name: compare(runs, comparison.select, None, by, published=False, metric=name) for name in names}
    cells = {name: accuracy_cells(table) for name, table in tables.items()}
    rows: list[markup.Cells] = [
        [shown_label(row), *(accuracy_data(cells[name][row["label"]][-1]) for name in names)]
        for _, row in comparison.methods.iterrows()
    ]
    text = "<h3>More than accuracy</h3>" + markup.table(["Method", *(METRICS[name].title for name in names)], rows)
    text += markup.bullets(
        [
            f"In %, averages over the targets, {over_seeds(comparison.most_seeds)}. Less is better in expected "
            "calibration error.",
            *(note for note in tables[names[0]].notes if note.startswith(("Missing", "Not computed"))),
        ]
    )
    return text + markup.folded("Accuracy of each class", class_accuracies(kept))


def class_accuracies(kept: dict[str, dict[str, Predictions]]) -> str:
    """HTML of the recall of every class, pooled over the targets that every method has, and over seeds."""
    targets, said = common_targets(kept)
    classes = next(iter(next(iter(kept.values())).values())).classes
    whole = {label: pooled([own[target] for target in targets]) for label, own in kept.items() if targets}
    rows: list[markup.Cells] = [
        [label, *(Data(percent(value), 100 * float(value)) for value in per_class_accuracy(predictions))]
        for label, predictions in whole.items()
    ]
    pooling = f"{said}The images of all targets and seeds are pooled, so that a target counts by its number of images."
    return markup.table(["Method", *classes], rows) + markup.bullets([pooling])


def segmentation(kept: dict[str, dict[str, list[Cases]]]) -> str:
    """HTML of Dice and average symmetric surface distance of each structure, averaged over targets and seeds.

    The targets are those that every method has. It is empty without cases, and has no numbers without such a target.
    """
    if not kept:
        return ""
    structures = next(iter(next(iter(kept.values())).values()))[0].structures
    heads = ["Method", *(f"{one}: Dice (%)" for one in structures), *(f"{one}: distance (px)" for one in structures)]
    targets, said = common_targets(kept)
    rows: list[markup.Cells] = []
    for label, by_target in kept.items() if targets else ():
        cases = [by_target[target] for target in targets]
        dice, distance = (
            np.mean([np.mean([getattr(one, kind).mean(axis=0) for one in own], axis=0) for own in cases], axis=0)
            for kind in STRUCTURE_QUANTITIES
        )
        numbers = [Data(percent(value), 100 * float(value)) for value in dice]
        rows.append([label, *numbers, *(Data(f"{value:.2f}", float(value)) for value in distance)])
    note = (
        f"{said}The numbers are averages over the images and seeds of a target, then over the targets. Distance: "
        "average symmetric surface distance, less is better; where a structure was not predicted at all, the diagonal "
        "of the image counts."
    )
    return "<h3>Structures</h3>" + markup.table(heads, rows) + markup.bullets([note])


def common_targets(kept: Mapping[str, Mapping[str, object]]) -> tuple[list[str], str]:
    """(the targets of {label: {target: ...}} that every label has, a sentence about others; empty without others).

    An average over a method's own targets would make one without the hardest target the best.
    """
    everyone = list(dict.fromkeys(target for by_target in kept.values() for target in by_target))
    common = [target for target in everyone if all(target in by_target for by_target in kept.values())]
    if common == everyone:
        return common, ""
    if not common:
        return common, "There are no numbers, because there is no target that every method has. "
    named = ", ".join(common)
    return common, f"The methods have different targets; these numbers are of only {named}, which every method has. "


def accuracy_data(cell: Cell, link: str = "") -> Data:
    """A report's cell: mean ± spread. It is sorted by the mean; the first and second place of a column are marked."""
    return Data(cell.plain, cell.value, {0: "", 1: "first", 2: "second"}[cell.place], link)
