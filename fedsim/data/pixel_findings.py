"""What the image files of a domain lose when they are decoded, of all of its files or of a part of them.

tally_of([measures, ...])           ->  plain numbers, which the cache keeps next to the decoded images
pixel_findings("oslo", numbers)  ->  the findings in them
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedsim.data.findings import Finding
from fedsim.data.pixels import DEEP_KINDS, FEW_LEVELS, RARE, Measures

HALF = 0.5  # of a domain's images, from which a finding is about the domain and therefore grave
Tally = Mapping[str, Any]


def tally_of(measured: Iterable[Measures]) -> dict[str, Any]:
    """The measures of many files as one table of numbers that JSON can hold.

    images: how many files; kinds: {kind: images, low, high, top} over the files of each kind; alpha: files of which
    most pixels are neither quite transparent nor quite opaque; flat: files of one grey level, or of two next to each
    other; stacks: files of several pages; pages: the most of them
    """
    images, alpha, flat, stacks, pages = 0, 0, 0, 0, 1
    kinds: dict[str, dict[str, Any]] = {}
    for one in measured:
        images += 1
        alpha += one.between > HALF
        flat += one.high - one.low < 2
        stacks += one.pages > 1
        pages = max(pages, one.pages)
        so_far = kinds.setdefault(one.kind, {"images": 0, "low": one.low, "high": one.high, "top": one.top})
        so_far["images"] += 1
        so_far["low"] = min(so_far["low"], one.low)
        so_far["high"] = max(so_far["high"], one.high)
        so_far["top"] = max(so_far["top"], one.top)
    return {"images": images, "kinds": kinds, "alpha": alpha, "flat": flat, "stacks": stacks, "pages": pages}


def pixel_findings(domain: str, numbers: Tally) -> list[Finding]:
    """The findings in the numbers of `tally_of` of one domain; grave where they concern half of its images or more."""
    images = numbers["images"]
    findings = list(_few_levels(domain, numbers))
    count = numbers["flat"]
    if count and not findings:
        text = (
            f"{count:,} of the {images:,} images of {domain} have one grey level everywhere, or two next to each other"
        )
        remedy = "look at these files (black and white ones show nothing), and leave them out or write them again"
        findings.append(Finding("few-levels", domain, count, text, remedy, count >= HALF * images))
    if count := numbers["alpha"]:
        text = (
            f"{count:,} of the {images:,} images of {domain} have a fourth channel with middle values in most pixels, "
            "which is taken for transparency: these pixels are mixed with white"
        )
        remedy = "if the channel holds data, write images of three channels"
        findings.append(Finding("alpha", domain, count, text, remedy, count >= HALF * images))
    if count := numbers["stacks"]:
        text = (
            f"{count:,} of the {images:,} image files of {domain} hold up to {numbers['pages']:,} pages of one size, "
            "and only the first page is read"
        )
        remedy = "write each page that is an image into a file of its own"
        findings.append(Finding("pages", domain, count, text, remedy, count >= HALF * images))
    return findings


def _few_levels(domain: str, numbers: Tally) -> Iterator[Finding]:
    """A finding for each kind of file that uses few of the grey levels that remain."""
    images = numbers["images"]
    for kind, of_kind in numbers["kinds"].items():
        count, levels = of_kind["images"], of_kind["high"] - of_kind["low"] + 1
        if levels > FEW_LEVELS:
            continue
        share = f" in {1 - 2 * RARE:.1%} of their pixels" if kind in DEEP_KINDS else ""
        text = (
            f"{count:,} of the {images:,} images of {domain} ({_form(kind, of_kind['top'])}) have only {levels} of 256 "
            f"grey levels, {of_kind['low']} to {of_kind['high']}{share}, after they are read"
        )
        remedy = "write these files with the whole range of values, as images of 8 bits"
        yield Finding("few-levels", domain, count, text, remedy, count >= HALF * images)


def _form(kind: str, top: float) -> str:
    """What files of a kind are, in words: 'files of 16 bits, whose largest value, 4,095, takes 12 bits'."""
    if kind == "float":
        return f"floats, of which the largest is {top:g} and not near 1"
    if kind in DEEP_KINDS:
        bits = max(int(top).bit_length(), 1)
        return f"files of 16 bits, whose largest value, {top:,.0f}, takes {bits} {'bit' if bits == 1 else 'bits'}"
    return f"mode {kind}, whose transparent parts are white" if "A" in kind else f"mode {kind}"
