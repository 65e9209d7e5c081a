"""The report's part on segmentations: each structure's Dice and surface distance."""

from collections.abc import Mapping

import numpy as np

from fedsim.results import markup
from fedsim.results.cases import Cases
from fedsim.results.cell_texts import percent
from fedsim.results.markup import Data


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
            for kind in ("dice", "surface_distance")
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
