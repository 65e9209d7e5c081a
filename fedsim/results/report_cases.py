"""The report's part on segmentations: each structure's Dice and surface distance."""

import numpy as np

from fedsim.errors import UserError
from fedsim.results import markup
from fedsim.results.cases import Cases, read_cases
from fedsim.results.cell_texts import percent
from fedsim.results.markup import Data
from fedsim.results.reading import Runs, run_folder


def kept_cases(runs: Runs, labels: dict[str, str], select: str) -> dict[str, dict[str, list[Cases]]]:
    """{label: {target: cases of its seeds, in their order}} of the runs that have kept cases."""
    found: dict[str, dict[str, list[Cases]]] = {}
    for row in runs.summary.sort_values("seed", kind="stable").itertuples():
        try:
            one = read_cases(run_folder(runs, row.run), select)
        except UserError:
            continue
        found.setdefault(labels[row.run], {}).setdefault(row.target, []).append(one)
    return {label: dict(sorted(targets.items())) for label, targets in found.items()}


def segmentation(kept: dict[str, dict[str, list[Cases]]]) -> str:
    """HTML of Dice and average symmetric surface distance of each structure, averaged over targets and seeds.

    It is empty without cases.
    """
    if not kept:
        return ""
    structures = next(iter(next(iter(kept.values())).values()))[0].structures
    heads = ["Method", *(f"{one}: Dice (%)" for one in structures), *(f"{one}: distance (px)" for one in structures)]
    rows = []
    for label, by_target in kept.items():
        dice, distance = (
            np.mean(
                [np.mean([getattr(one, kind).mean(axis=0) for one in own], axis=0) for own in by_target.values()], 0
            )
            for kind in ("dice", "surface_distance")
        )
        numbers = [Data(percent(value), float(value)) for value in dice]
        rows.append([label, *numbers, *(Data(f"{value:.2f}", float(value)) for value in distance)])
    note = (
        "The numbers are averages over the images and seeds of a target, then over the targets. Distance: average "
        "symmetric surface distance, less is better; where a structure was not predicted at all, the diagonal of the "
        "image counts."
    )
    return "<h3>Structures</h3>" + markup.table(heads, rows) + markup.bullets([note])
