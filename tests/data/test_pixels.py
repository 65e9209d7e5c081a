"""Unusual image files are in the cache as a screen shows them, or are refused by name."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from fedsim.common.errors import UserError
from fedsim.data.mask_folders import decode_mask
from fedsim.data.pixels import decode, decode_picture

RAMP = np.linspace(0, 1, 16).reshape(4, 4)  # brightness of the test picture
EIGHT = np.round(RAMP * 255).astype(np.uint8)


def decoded(image: Image.Image, format: str, **options) -> np.ndarray:
    """The cached pixels uint8 [4, 4, 3] of an image that was saved and read again."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return decode("picture", 4, file.getvalue()).transpose(1, 2, 0).astype(int)


def grey(found: np.ndarray) -> np.ndarray:
    assert (found == found[..., :1]).all()
    return found[..., 0]


DEEP = np.where(RAMP < 1, np.round(RAMP * 65535) + 100, 65435).astype(np.uint16)  # divided by 257 and rounded: EIGHT
BIG_ENDIAN = Image.frombytes("I;16B", (4, 4), DEEP.astype(">u2").tobytes())


@pytest.mark.parametrize(("image", "format"), [
    *((Image.fromarray(pixels), format) for pixels in (DEEP, EIGHT) for format in ("PNG", "TIFF", "PPM")),
    (BIG_ENDIAN, "TIFF"), (Image.fromarray(RAMP.astype(np.float32)), "TIFF"),
])  # fmt: skip
def test_all_depths_look_like_eight_bits(image, format):
    assert (grey(decoded(image, format)) == EIGHT).all()


INTEGERS = Image.fromarray((RAMP * 1e6).astype(np.int32))


@pytest.mark.parametrize(("image", "reason"), [
    *((Image.fromarray(values.astype(np.float32)), said) for values, said in (
        (RAMP * 255, "floats from 0 to 255, not from 0 to 1"), (RAMP - 0.5, "floats from -0.5 to 0.5"),
        (RAMP * np.nan, "floats from nan to nan"))),
    (INTEGERS, "32-bit integers, whose range is not known"), (Image.new("LAB", (4, 4)), "colour mode LAB"),
])  # fmt: skip
def test_what_has_no_clear_brightness_is_refused_by_name(image, reason, tmp_path):
    with pytest.raises(UserError, match=rf"^cannot read the image picture \({reason}[^\n]*$"):
        decoded(image, "TIFF")
    with pytest.raises(UserError, match=r"cannot read the image from Pillow \(32-bit integers"):
        decode_picture(INTEGERS, 4)
    file = tmp_path / "note.png"
    file.write_text("not an image")
    with pytest.raises(UserError, match=r"note.png \(not an image that Pillow knows\); replace or remove it"):
        decode(file, 4)


UPRIGHT = np.stack([EIGHT, np.flipud(EIGHT), np.full_like(EIGHT, 60)], -1)
SAVED = {
    1: UPRIGHT, 2: UPRIGHT[:, ::-1], 3: UPRIGHT[::-1, ::-1], 4: UPRIGHT[::-1], 5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT), 7: UPRIGHT[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(UPRIGHT, -1),
}  # fmt: skip


@pytest.mark.parametrize("orientation", SAVED)
@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_exif_turns_the_picture(orientation, format):
    image = Image.fromarray(np.ascontiguousarray(SAVED[orientation]))
    exif, tags = image.getexif(), TiffImagePlugin.ImageFileDirectory_v2()
    exif[0x0112] = tags[0x0112] = orientation
    options = {"tiffinfo": tags} if format == "TIFF" else {"exif": exif, "lossless": True}
    assert (decoded(image, format, **options) == UPRIGHT).all()


def test_transparency_palettes_and_ink():
    colour = np.dstack([EIGHT, EIGHT, EIGHT, np.array([0, 0, 128, 255])[:, None].repeat(4, 1).astype(np.uint8)])
    found = grey(decoded(Image.fromarray(colour), "PNG"))
    assert (found[:2] == 255).all()
    assert (found[3] == EIGHT[3]).all()
    assert np.abs(found[2] - (EIGHT[2] * (128 / 255) + 255 * (127 / 255))).max() <= 1
    colours = [(255 - index, index, 7) for index in range(16)]
    found = decoded(palette(colours, Image.fromarray((EIGHT // 17).astype(np.uint8), "P")), "PNG")
    assert (found[..., 0] == 255 - EIGHT // 17).all()
    assert (found[..., 2] == 7).all()
    assert set(grey(decoded(Image.fromarray(EIGHT > 100), "PNG")).flatten()) == {0, 255}
    ink = Image.new("CMYK", (4, 4), (0, 255, 255, 0))  # magenta and yellow make red
    for format, options in (("TIFF", {}), ("JPEG", {"quality": 100})):
        assert np.abs(decoded(ink, format, **options) - [255, 0, 0]).max() <= 3


def palette(colours, picture):
    picture.putpalette([value for colour in colours for value in colour])
    return picture


@pytest.mark.parametrize(("image", "options"), [
    (Image.fromarray(np.dstack([EIGHT, np.zeros_like(EIGHT)])), {}),
    (palette([(index,) * 3 for index in range(256)], Image.new("P", (4, 4), 3)), {"transparency": 3}),
    (Image.new("L", (4, 4), 9), {"transparency": 9}),
    (Image.new("RGB", (4, 4), (9, 8, 7)), {"transparency": (9, 8, 7)}),
])  # fmt: skip
def test_every_kind_of_transparency_is_seen(image, options):
    assert (decoded(image, "PNG", **options) == 255).all()


def tiff(value: float, photometric: int, type: str) -> bytes:
    """A grey TIFF of 8 x 8 pixels of one value; `type` is NumPy's, e.g. ">u2"."""
    end, bits = type[0], 8 * int(type[2])
    pixels = np.full(64, value, type).tobytes()
    tags = {256: 8, 257: 8, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 8, 279: len(pixels),
            339: 3 if type[1] == "f" else 1}  # fmt: skip
    entries = b"".join(struct.pack(f"{end}HHII", tag, 4, 1, number) for tag, number in tags.items())
    magic = b"II*\0" if end == "<" else b"MM\0*"
    head = magic + struct.pack(f"{end}I", 8 + len(pixels))
    return head + pixels + struct.pack(f"{end}H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(("value", "type"), [(230, "<u1"), (230 * 257, "<u2"), (230 / 255, "<f4")])
def test_where_white_is_zero_the_image_is_no_negative(value, type):
    shades = [int(decode(Path("x.tif"), 8, tiff(value, photometric, type)).max()) for photometric in (1, 0)]
    assert shades == [230, 25]


def test_masks_of_16_bits_in_either_order_of_bytes():
    for type in ("<u2", ">u2"):
        planes, _, _ = decode_mask(Path("x.tif"), 4, tiff(300, 1, type), {"disc": [300], "cup": [44]})
        assert planes.mean((1, 2)).tolist() == [1, 0]
