"""What the image files of a domain lose when they are decoded, of all of its files or of a part of them.

tally_of([measures, ...])           ->  plain numbers, which the cache keeps next to the decoded images
pixel_findings("oslo", numbers)  ->  the findings in them
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedsim.data.findings import Finding
from fedsim.data.pixels import DEEP_KINDS, FEW_LEVELS, RARE, Measures

HALF = 0.5  # of a domain's images, from which a finding is about the domain and therefore grave
TRANSPARENT = "which is taken for transparency: these pixels are mixed with white"
Tally = Mapping[str, Any]


def tally_of(measured: Iterable[Measures]) -> dict[str, Any]:
    """The measures of many files as one table of numbers that JSON can hold.

    images: how many files; kinds: {kind: images, low, high, top} over the files of each kind; alpha: files of which
    most pixels are neither quite transparent nor quite opaque; flat: files of one grey level, or of two next to each
    other; stacks: files of several pages; pages: the most of them
    """
    kinds: dict[str, dict[str, Any]] = {}
    tally: dict[str, Any] = {
        "images": 0,
        "kinds": kinds,
        "alpha": 0,
        "flat": 0,
        "stacks": 0,
        "pages": 1,
    }
    for file in measured:
        tally["images"] += 1
        tally["alpha"] += file.between > HALF
        tally["flat"] += file.high - file.low < 2
        tally["stacks"] += file.pages > 1
        tally["pages"] = max(tally["pages"], file.pages)
        unseen = {"images": 0, "low": file.low, "high": file.high, "top": file.top}
        of_kind = kinds.setdefault(file.kind, unseen)
        of_kind["images"] += 1
        of_kind["low"] = min(of_kind["low"], file.low)
        of_kind["high"] = max(of_kind["high"], file.high)
        of_kind["top"] = max(of_kind["top"], file.top)
    return tally


def pixel_findings(domain: str, numbers: Tally) -> list[Finding]:
    """The findings in the numbers of `tally_of` of one domain; grave where they concern half of its images or more."""
    findings = list(_few_levels(domain, numbers))
    if numbers["flat"] and not findings:
        finding = _finding(
            "few-levels",
            domain,
            numbers,
            count=numbers["flat"],
            text=f"images of {domain} have one grey level everywhere, or two next to each other",
            remedy="look at these files (black and white ones show nothing), and leave them out or write them again",
        )
        findings.append(finding)
    if numbers["alpha"]:
        finding = _finding(
            "alpha",
            domain,
            numbers,
            count=numbers["alpha"],
            text=f"images of {domain} have a fourth channel with middle values in most pixels, {TRANSPARENT}",
            remedy="if the channel holds data, write images of three channels",
        )
        findings.append(finding)
    if numbers["stacks"]:
        pages = f"{numbers['pages']:,} pages of one size"
        finding = _finding(
            "pages",
            domain,
            numbers,
            count=numbers["stacks"],
            text=f"image files of {domain} hold up to {pages}, and only the first page is read",
            remedy="write each page that is an image into a file of its own",
        )
        findings.append(finding)
    return findings


def _finding(kind: str, domain: str, numbers: Tally, count: int, text: str, remedy: str) -> Finding:
    """A finding in some images of a domain. text: what they have, to follow their number"""
    images = numbers["images"]
    return Finding(
        kind=kind,
        where=domain,
        count=count,
        text=f"{count:,} of the {images:,} {text}",
        remedy=remedy,
        is_grave=count >= HALF * images,
    )


def _few_levels(domain: str, numbers: Tally) -> Iterator[Finding]:
    """A finding for each kind of file that uses few of the grey levels that remain."""
    for kind, of_kind in numbers["kinds"].items():
        low, high = of_kind["low"], of_kind["high"]
        levels = high - low + 1
        if levels > FEW_LEVELS:
            continue
        form = _form(kind, of_kind["top"])
        used = f"only {levels} of 256 grey levels, {low} to {high}"
        if kind in DEEP_KINDS:
            used += f" in {1 - 2 * RARE:.1%} of their pixels"
        yield _finding(
            "few-levels",
            domain,
            numbers,
            count=of_kind["images"],
            text=f"images of {domain} ({form}) have {used}, after they are read",
            remedy="write these files with the whole range of values, as images of 8 bits",
        )


def _form(kind: str, top: float) -> str:
    """What files of a kind are, in words: 'files of 16 bits, whose largest value, 4,095, takes 12 bits'."""
    if kind == "float":
        return f"floats, of which the largest is {top:g} and not near 1"
    if kind in DEEP_KINDS:
        bits = max(int(top).bit_length(), 1)
        unit = "bit" if bits == 1 else "bits"
        return f"files of 16 bits, whose largest value, {top:,.0f}, takes {bits} {unit}"
    if "A" in kind:
        return f"mode {kind}, whose transparent parts are white"
    return f"mode {kind}"
