"""The values in the mask files of a domain that no structure names: at most one of them is the background.

value_tally([{0: 900, 255: 100}, ...])     ->  {"0": [masks, pixels], "255": [masks, pixels]}
mask_findings({"oslo": tally, ...}, {"lesion": [255]})  ->  the findings in them
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedsim.data.findings import Finding, joined_names

MOST_VALUES = 1000  # that are kept of a domain, the ones with the most pixels
COUNTED = 65536  # values up to here are counted without sorting
SHOWN_VALUES = 6
INTERPOLATED = 8  # more unnamed values than these look like a resized mask
Tally = Mapping[str, Sequence[int]]  # {value as text: (masks that have it, pixels)}; JSON has no other keys


def value_counts(values: np.ndarray) -> dict[int, int]:
    """{value: pixels} of one mask, int64 [height, width]."""
    if values.size and values.min() >= 0 and values.max() < COUNTED:
        counts = np.bincount(values.ravel())
        present = np.flatnonzero(counts)
        return dict(zip(present.tolist(), counts[present].tolist()))
    present, counts = np.unique(values, return_counts=True)
    return dict(zip(present.tolist(), counts.tolist()))


def value_tally(counted: Iterable[Mapping[int, int]]) -> dict[str, list[int]]:
    """{value: [masks that have it, pixels]} over the masks of a domain, of the values with the most pixels."""
    masks: Counter[int] = Counter()
    pixels: Counter[int] = Counter()
    for counts in counted:
        masks.update(counts.keys())
        pixels.update(counts)
    return {str(value): [masks[value], count] for value, count in pixels.most_common(MOST_VALUES)}


def mask_findings(tallies: Mapping[str, Tally], structures: Mapping[str, Sequence[int]]) -> list[Finding]:
    """A grave finding for each domain whose masks have values that neither a structure names nor are the background.

    The background is the one unnamed value that most pixels of all domains have.
    """
    named = {value for values in structures.values() for value in values}
    unnamed: dict[str, dict[int, Sequence[int]]] = {}
    pixels: Counter[int] = Counter()
    for domain, tally in tallies.items():
        unnamed[domain] = {int(value): counts for value, counts in tally.items() if int(value) not in named}
        for value, (_, count) in unnamed[domain].items():
            pixels[value] += count
    if len(pixels) < 2:
        return []
    [(background, _)] = pixels.most_common(1)
    findings = []
    for domain, of_domain in unnamed.items():
        others = {value: counts for value, counts in of_domain.items() if value != background}
        if others:
            is_everywhere = all(others.keys() <= values.keys() for values in unnamed.values())
            findings.append(_finding(domain, others, background, is_everywhere))
    return findings


def _finding(
    domain: str,
    others: Mapping[int, Sequence[int]],
    background: int,
    is_everywhere: bool,
) -> Finding:
    """The finding for one domain; others: its values that nothing explains. is_everywhere: all domains have them"""
    masks = max(count for count, _ in others.values())
    pixels = sum(count for _, count in others.values())
    shown = joined_names([str(value) for value in sorted(others)], SHOWN_VALUES)
    text = (
        f"{pixels:,} pixels of the masks of {domain} (of up to {masks:,} masks) have the values {shown}, which no "
        f"structure names, and count as background, as {background} does"
    )
    if len(others) > INTERPOLATED:
        remedy = "so many values come from resizing: resize the masks to the nearest pixel, without interpolation"
    elif is_everywhere:
        remedy = (
            "name them in data.structures; pixels that nothing should count cannot be left out, so leave out these "
            "images"
        )
    else:
        remedy = "other domains do not have them: name them in data.structures, or correct the masks"
    return Finding("mask-values", domain, masks, text, remedy, is_grave=True)
