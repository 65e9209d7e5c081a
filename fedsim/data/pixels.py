"""One image file as RGB pixels: every kind of file that Pillow reads is either decoded correctly or refused by name."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from fedsim.common.errors import UserError

BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # tags of TIFF, and a value of the second
COLOUR = {"1", "L", "P", "RGB", "RGBA", "RGBa", "RGBX", "LA", "La", "PA", "CMYK", "YCbCr", "HSV"}


def decode(path: Path, image_size: int, content: bytes | None = None) -> np.ndarray:
    """One image file as RGB uint8 [3,s,s]; see `decode_sized`."""
    return decode_sized(path, image_size, content)[0]


def decode_sized(path: Path, image_size: int, content: bytes | None = None) -> tuple[np.ndarray, tuple[int, int]]:
    """One image file as RGB uint8 [3,s,s], and its own height and width in pixels, upright.

    Both sides are resized, bilinear and antialiased (DomainBed's evaluation). The image is turned as its EXIF says.
    Transparent parts become white. 16-bit values are divided by 257 (12-bit ones by 4095/255), and floats are
    brightness from 0 to 1. Of several pages or frames the first is used. Colour profiles are not applied. `content` are
    the file's bytes when they have been read already. Raises UserError with the file's name for files that cannot be
    read, 32-bit integers, floats outside 0..1, and colour spaces that Pillow cannot convert.
    """
    content = read_bytes(path) if content is None else content
    with refusals(path), Image.open(io.BytesIO(content)) as image:
        return _resized(image, image_size)


def decode_picture(image: Image.Image, image_size: int) -> np.ndarray:
    """A picture that Pillow has opened or made, as RGB uint8 [3,s,s]: the pixels that `decode` makes of its file."""
    with refusals(getattr(image, "filename", "") or "from Pillow"):
        return _resized(image, image_size)[0]


@contextmanager
def refusals(name: Path | str) -> Iterator[None]:
    """Turns the errors of an image into a UserError with its name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Pillow raises almost any class for a damaged file
        reason = "not an image that Pillow knows" if isinstance(error, UnidentifiedImageError) else str(error)
        raise unreadable(name, reason) from None


def _resized(image: Image.Image, image_size: int) -> tuple[np.ndarray, tuple[int, int]]:
    picture = _rgb(image)
    small = picture.resize((image_size, image_size), Image.Resampling.BILINEAR)
    return np.asarray(small).transpose(2, 0, 1), (picture.height, picture.width)


def read_bytes(path: Path) -> bytes:
    """A file's bytes; UserError when it cannot be read."""
    try:
        if path.is_fifo():
            raise OSError(0, "a pipe, which would be waited for")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path | str, reason: str | Exception) -> UserError:
    """The error for an image file that cannot be used."""
    reason = getattr(reason, "strerror", None) or str(reason)
    return UserError(f"cannot read the image {path} ({reason}); replace or remove it")


def _rgb(image: Image.Image) -> Image.Image:
    """The image in mode RGB, upright."""
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    transparent = image.has_transparency_data
    if image.mode not in COLOUR:
        if transparent:
            raise ValueError(f"mode {image.mode} with a transparent colour; convert it to 8 bits")
        image = _eight_bits(ImageOps.exif_transpose(image), image.format, tags.get(BITS_PER_SAMPLE, (16,))[0])
        if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow inverts such images of 8 bits alone
            image = ImageOps.invert(image)
    else:
        image = ImageOps.exif_transpose(image)
    if not transparent:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _eight_bits(image: Image.Image, format: str | None, bits: int) -> Image.Image:
    """Grey values of more than 8 bits, scaled by the range of their mode."""
    values = np.asarray(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and format == "PPM"):
        return Image.fromarray(np.round(values * (255 / (4095 if bits == 12 else 65535))).astype(np.uint8))
    if image.mode == "F":
        low, high = float(values.min()), float(values.max())
        if 0 <= low <= high <= 1:
            return Image.fromarray(np.round(values * 255).astype(np.uint8))
        raise ValueError(f"floats from {low:g} to {high:g}, not from 0 to 1; convert it to 8 bits")
    if image.mode == "I":
        raise ValueError("32-bit integers, whose range is not known; convert it to 8 or 16 bits")
    raise ValueError(f"colour mode {image.mode}; convert it to RGB")
