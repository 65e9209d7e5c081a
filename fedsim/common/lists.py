"""Lists in words: options of the command line that hold several names or numbers, and names in a message."""

from collections.abc import Collection, Iterable, Sequence

from fedsim.common.errors import UserError


def names_of(option: str, text: str) -> list[str]:
    """`rot0, rot15` -> ["rot0", "rot15"]; an empty text means that the option is not given.

    UserError for an empty name between the commas: what it would mean is not known.
    """
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    if not all(names):
        raise UserError(f"{option} {text!r}: a name is empty; give names separated by single commas, or leave it out")
    return names


def first_few(names: Iterable[str], shown: int = 10) -> str:
    """`a, b, c`, or `a, b and 998 more`: a federation may have thousands of clients."""
    listed = list(names)
    return ", ".join(listed[:shown]) + (f" and {len(listed) - shown} more" if len(listed) > shown else "")


def with_commas(words: Sequence[str], labels: Collection[str]) -> list[str]:
    """Words of an option that was split at its commas; those that are one of the labels together are one name."""
    names, start = [], 0
    while start < len(words):
        ends = [end for end in range(len(words), start, -1) if ",".join(words[start:end]) in labels]
        end = ends[0] if ends else start + 1
        names.append(",".join(words[start:end]))
        start = end
    return names


def numbers_of(option: str, text: str) -> list[int]:
    """`0, 1, 2` -> [0, 1, 2]; an empty text means that the option is not given. UserError for anything else."""
    numbers = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isascii() and word.isdigit() for word in numbers):
        raise UserError(f"{option} {text!r}: give whole numbers separated by commas, e.g. 0,1,2")
    return [int(word) for word in numbers]


def times(ratio: float) -> str:
    """A factor with two digits that count and no exponent: `0.68`, `1.3`, `140`, `12,000`."""
    return f"{float(f'{ratio:.2g}'):,.10g}"
