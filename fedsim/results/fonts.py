"""Fonts that have the signs of a figure's names: Chinese, Japanese, Korean and others that the standard font lacks."""

from collections.abc import Iterable
from functools import cache

from matplotlib import font_manager

STANDARD = "DejaVu Sans"  # comes with matplotlib
NO_LETTERS = ("Last Resort",)  # draws a box for every sign, and so "has" all of them


def fonts_for(texts: Iterable[str]) -> tuple[list[str], str]:
    """(font families in the order in which matplotlib asks them, signs that no installed font has).

    The standard font comes first; others are looked for only where it lacks a sign.
    """
    wanted = {sign for text in texts for sign in text if sign.isprintable() and not sign.isspace()}
    families, missing = [STANDARD], wanted - signs_of(font_manager.findfont(STANDARD))
    while missing:
        found = [(len(missing & signs_of(path)), name, path) for name, path in installed().items()]
        count, name, path = max(found, key=lambda one: one[0], default=(0, "", ""))
        if not count:
            break
        families.append(name)
        missing -= signs_of(path)
    return families, "".join(sorted(missing))


def missing_text(missing: str) -> str:
    """One line about signs that are drawn as boxes; empty without any."""
    if not missing:
        return ""
    shown = missing if len(missing) <= 20 else f"{missing[:20]}…"
    return f"no installed font has {shown}: boxes in the figures; install one that does, e.g. Noto Sans CJK"


@cache
def installed() -> dict[str, str]:
    """File of each installed family, those included that came after matplotlib made its list."""
    known = {font.fname for font in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in known:
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
    """The signs that a font file has; none of a file that cannot be read."""
    try:
        return frozenset(map(chr, font_manager.get_font(path).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()
