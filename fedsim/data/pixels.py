"""One image file as RGB pixels: every kind of file that Pillow reads is either decoded correctly or refused by name.

Decoding also measures what its result does not show, such as the range of values that the file uses; see `Measures`.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from fedsim.common.errors import UserError

BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # tags of TIFF, and a value of the second
LARGEST_SAMPLE = 281  # tag of TIFF: the largest value that its samples may have
DEEP = 65535  # largest value of 16 bits
DEEP_KINDS = ("16 bits", "float")
FEW_LEVELS = 32  # of 256: a range of fewer is looked at closely
RARE = 0.001  # share of a deep image's pixels at either end of its range that do not count
STACKS = ("TIFF",)  # formats whose pages of one size are the slices of a volume or several pictures
Size = tuple[int, int]  # height and width in pixels
COLOUR = {"1", "L", "P", "RGB", "RGBA", "RGBa", "RGBX", "LA", "La", "PA", "CMYK", "YCbCr", "HSV"}


class Measures(NamedTuple):
    """What decoding one image file has seen of it.

    kind: how its pixels are stored, such as "RGB", "L", "16 bits" or "float"
    low, high: the least and the largest grey level, 0 to 255, after scaling to 8 bits; exact where there are fewer than
    FEW_LEVELS between them, and without the rarest pixels where the file has more than 8 bits
    top: the largest number in a file of more than 8 bits; 0 for others
    between: the share of its pixels that are neither quite transparent nor quite opaque
    pages: pages of one size in a file that is a stack; else 1
    """

    kind: str
    low: int
    high: int
    top: float = 0.0
    between: float = 0.0
    pages: int = 1


def decode(path: Path, image_size: int, content: bytes | None = None) -> np.ndarray:
    """One image file as RGB uint8 [3,s,s]; see `decode_sized`."""
    return decode_sized(path, image_size, content)[0]


def decode_sized(path: Path, image_size: int, content: bytes | None = None) -> tuple[np.ndarray, Size]:
    """One image file as RGB uint8 [3,s,s], and its own height and width in pixels, upright.

    Both sides are resized, bilinear and antialiased (DomainBed's evaluation). The image is turned as its EXIF says.
    Transparent parts become white. 16-bit values are divided by 257 (12-bit ones by 4095/255), and floats are
    brightness from 0 to 1. Of several pages or frames the first is used. Colour profiles are not applied. `content` are
    the file's bytes when they have been read already. Raises UserError with the file's name for files that cannot be
    read, 32-bit integers, floats outside 0..1, and colour spaces that Pillow cannot convert.
    """
    return decode_measured(path, image_size, content)[:2]


def decode_measured(
    path: Path,
    image_size: int,
    content: bytes | None = None,
) -> tuple[np.ndarray, Size, Measures]:
    """One image file as `decode_sized` gives it, and what decoding has seen of the file."""
    if content is None:
        content = read_bytes(path)
    with refusals(path), Image.open(io.BytesIO(content)) as image:
        return _resized(image, image_size, content)


def decode_picture(image: Image.Image, image_size: int) -> np.ndarray:
    """A picture that Pillow has opened or made, as RGB uint8 [3,s,s]: the pixels that `decode` makes of its file."""
    name = getattr(image, "filename", "") or "from Pillow"
    with refusals(name):
        pixels, _, _ = _resized(image, image_size, b"")
    return pixels


@contextmanager
def refusals(name: Path | str) -> Iterator[None]:
    """Turns the errors of an image into a UserError with its name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Pillow raises almost any class for a damaged file
        is_unknown = isinstance(error, UnidentifiedImageError)
        reason = "not an image that Pillow knows" if is_unknown else str(error)
        raise unreadable(name, reason) from None


def _resized(image: Image.Image, image_size: int, content: bytes) -> tuple[np.ndarray, Size, Measures]:
    """The pixels, the size and the measures of an opened image, whose file has this content."""
    pages = _pages(image)
    picture, kind, top, between = _rgb(image, content)
    small = picture.resize((image_size, image_size), Image.Resampling.BILINEAR)
    low, high = _range_of(picture, small, kind in DEEP_KINDS)
    pixels = np.asarray(small).transpose(2, 0, 1)
    size = picture.height, picture.width
    measures = Measures(kind, low, high, top, between, pages)
    return pixels, size, measures


def _range_of(picture: Image.Image, small: Image.Image, is_deep: bool) -> tuple[int, int]:
    """(the least, the largest) level of a picture in mode RGB; `small`: the same picture, resized.

    The small picture answers at once for almost all of them, because its range lies within the other one's.
    """
    if not is_deep:
        low, high = _ends(small)
        if high - low < FEW_LEVELS:
            low, high = _ends(picture)
        return low, high
    counts = picture.getchannel("R").histogram()  # a deep image is grey
    shares = np.cumsum(counts) / sum(counts)
    low, high = np.searchsorted(shares, [RARE, 1 - RARE])
    return int(low), int(high)


def _ends(picture: Image.Image) -> tuple[int, int]:
    """The least and the largest value of any channel."""
    lows, highs = zip(*picture.getextrema())
    return min(lows), max(highs)


def _pages(image: Image.Image) -> int:
    """How many pages of the first one's size a stack has; 1 for any other file. The first page is open afterwards."""
    if image.format not in STACKS:
        return 1
    count = getattr(image, "n_frames", 1)
    if count < 2:
        return 1
    size = image.size
    image.seek(1)
    is_stack = image.size == size  # a page of another size is a reduced picture
    image.seek(0)
    return count if is_stack else 1


def read_bytes(path: Path) -> bytes:
    """A file's bytes; UserError when it cannot be read."""
    try:
        if path.is_fifo():
            raise OSError(0, "a pipe, which would be waited for")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


class MissingImageError(UserError):
    """There is no file of an image that a table, a list or a folder names."""


def unreadable(path: Path | str, reason: str | Exception) -> UserError:
    """The error for an image file that cannot be used, with what can be done about it."""
    cause = getattr(reason, "strerror", None) or str(reason)
    text = f"cannot read the image {path} ({cause})"
    if isinstance(reason, FileNotFoundError | NotADirectoryError):
        return MissingImageError(f"{text}; put the file there, or correct its path where it is named")
    if isinstance(reason, PermissionError):
        return UserError(f"{text}; let this user read it")
    return UserError(f"{text}; replace or remove it")


def _rgb(image: Image.Image, content: bytes) -> tuple[Image.Image, str, float, float]:
    """(the image in mode RGB and upright, its kind, the largest number of a deep one, its share between); `Measures`"""
    is_transparent = image.has_transparency_data
    if image.mode in COLOUR:
        kind, top = image.mode, 0.0
        picture = ImageOps.exif_transpose(image)
    else:
        kind = DEEP_KINDS[image.mode == "F"]
        picture, top = _grey(image, content)
    if not is_transparent:
        return picture.convert("RGB"), kind, top, 0.0
    picture = picture.convert("RGBA")
    counts = picture.getchannel("A").histogram()
    between = sum(counts[1:255]) / sum(counts)
    white = Image.new("RGBA", picture.size, "white")
    opaque = Image.alpha_composite(white, picture)
    return opaque.convert("RGB"), kind, top, between


def _grey(image: Image.Image, content: bytes) -> tuple[Image.Image, float]:
    """(an image of more than 8 bits as 8 bits of grey, upright; its largest number before)."""
    if image.has_transparency_data:
        raise ValueError(f"mode {image.mode} with a transparent colour; convert it to 8 bits")
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    upright = ImageOps.exif_transpose(image)
    grey, top = _eight_bits(upright, image.format, tags, content)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow inverts such images of 8 bits alone
        grey = ImageOps.invert(grey)
    return grey, top


def _eight_bits(
    image: Image.Image,
    format: str | None,
    tags: Mapping[int, Any],
    content: bytes,
) -> tuple[Image.Image, float]:
    """(grey values of more than 8 bits, scaled by the range of their mode; the largest one before)."""
    values = np.asarray(image)
    top = float(values.max())
    is_deep_ppm = image.mode == "I" and format == "PPM"
    if image.mode.startswith("I;16") or is_deep_ppm:
        largest = _largest_sample(values, top, format, tags, content)
        levels = np.round(values * (255 / largest))
        return Image.fromarray(levels.astype(np.uint8)), top
    if image.mode == "F":
        low = float(values.min())
        if 0 <= low <= top <= 1:
            levels = np.round(values * 255)
            return Image.fromarray(levels.astype(np.uint8)), top
        raise ValueError(f"floats from {low:g} to {top:g}, not from 0 to 1; convert it to 8 bits")
    if image.mode == "I":
        raise ValueError("32-bit integers, whose range is not known; convert it to 8 or 16 bits")
    raise ValueError(f"colour mode {image.mode}; convert it to RGB")


def _largest_sample(
    values: np.ndarray,
    top: float,
    format: str | None,
    tags: Mapping[int, Any],
    content: bytes,
) -> int:
    """The largest value that the samples of an image of 16 bits may have, as its file says it; else 65535.

    A TIFF file has its bits per sample (12) or its largest sample, which is a range where it is the largest number of
    some bits, such as 1023. Another one is the largest value of this file alone, as TIFF 6.0 has it. PNG's sBIT says
    how many bits count. They are the upper ones, and then nothing is to be done, or the lower ones, which a file shows
    that uses no other.
    """
    named = int(tags.get(LARGEST_SAMPLE, (DEEP,))[0])
    if named & (named + 1):
        named = DEEP
    if tags.get(BITS_PER_SAMPLE, (16,))[0] == 12:
        named = 4095
    bits = significant_bits(content) if format == "PNG" else 0
    if bits:
        below = 2 ** (16 - bits) - 1  # the bits that are free where the upper ones count
        uses_lower_bits = (values & below).any()
        named = 2**bits - 1 if uses_lower_bits else DEEP
    return named if 0 < top <= named else DEEP


def significant_bits(content: bytes) -> int:
    """The bits of a grey PNG file's samples that count, from its sBIT chunk; 0 without one."""
    place = 8  # after the signature; each chunk has a length, a name, its data and a checksum
    while (name := content[place + 4 : place + 8]) not in (b"IDAT", b"IEND", b""):
        length = int.from_bytes(content[place : place + 4], "big")
        if name == b"sBIT":
            bits = content[place + 8]
            return bits if length == 1 and 0 < bits < 16 else 0
        place += length + 12
    return 0
