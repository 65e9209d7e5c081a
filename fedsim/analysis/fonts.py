"""Fonts for names whose characters the standard font lacks, such as Chinese, Japanese and Korean ones."""

from collections.abc import Iterable
from functools import cache

from matplotlib import font_manager

STANDARD = "DejaVu Sans"  # comes with matplotlib
NO_LETTERS = ("Last Resort",)  # claims to have every character, but draws a box for each


def fonts_for(texts: Iterable[str]) -> tuple[list[str], str]:
    """(font families in the order in which matplotlib tries them, characters that no installed font has).

    The standard font comes first; others are looked for only when it lacks a character.
    """
    signs = set().union(*texts)
    missing = {sign for sign in signs if sign.isprintable() and not sign.isspace()}
    missing -= signs_of(font_manager.findfont(STANDARD))
    families = [STANDARD]
    while missing:
        counts = {name: len(missing & signs_of(path)) for name, path in installed().items()}
        best = max(counts, key=counts.__getitem__, default="")
        if not counts.get(best):
            break
        families.append(best)
        missing -= signs_of(installed()[best])
    return families, "".join(sorted(missing))


def missing_text(missing: str) -> str:
    """One line about characters that are drawn as boxes; empty when there are none."""
    if not missing:
        return ""
    shown = missing if len(missing) <= 20 else f"{missing[:20]}…"
    return f"no installed font has {shown}; the figures show boxes instead; install a font such as Noto Sans CJK"


@cache
def installed() -> dict[str, str]:
    """{name of each installed family: its file}, including families that are newer than matplotlib's own list."""
    listed = {font.fname for font in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in listed:
            font_manager.fontManager.addfont(path)
    upright = [font for font in font_manager.fontManager.ttflist if font.style == "normal"]
    upright.sort(key=lambda font: (font.weight not in (400, "normal", "regular"), font.fname))
    files: dict[str, str] = {}
    for font in upright:
        if not font.name.startswith(NO_LETTERS):
            files.setdefault(font.name, font.fname)
    return files


@cache
def signs_of(path: str) -> frozenset[str]:
    """The characters that a font file has; none when the file cannot be read."""
    try:
        return frozenset(map(chr, font_manager.get_font(path).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()
