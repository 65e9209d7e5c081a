"""Unusual image files are in the cache as a screen shows them, or are refused by name."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, TiffImagePlugin

from fedsim.common.errors import UserError
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


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_look_like_eight(format):
    deep = Image.fromarray(np.round(RAMP * 65535).astype(np.uint16))
    assert (grey(decoded(deep, format)) == EIGHT).all()
    assert (grey(decoded(Image.fromarray(EIGHT), format)) == EIGHT).all()


def pictures():
    """Pictures that Pillow's own conversion to RGB shows otherwise than a screen, with what their file adds."""
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned by 90 degrees
    return {
        "turned": (Image.fromarray(EIGHT), {"exif": exif}),
        "transparent": (Image.fromarray(np.stack([EIGHT * 0, EIGHT * 0, EIGHT * 0, EIGHT], -1)), {}),
        "deep": (Image.fromarray(np.round(RAMP * 65535).astype(np.uint16)), {}),
    }


@pytest.mark.parametrize("name", pictures())
def test_an_opened_picture_has_the_pixels_of_its_file(name):
    picture, options = pictures()[name]
    file = io.BytesIO()
    picture.save(file, "PNG", **options)
    opened = decode_picture(Image.open(io.BytesIO(file.getvalue())), 4)
    assert (opened == decode("picture", 4, file.getvalue())).all()
    assert (opened != np.asarray(picture.convert("RGB")).transpose(2, 0, 1)).any()


def test_an_opened_picture_of_unclear_brightness_is_refused():
    with pytest.raises(UserError, match=r"cannot read the image from Pillow \(32-bit integers"):
        decode_picture(Image.fromarray(EIGHT.astype(np.int32)), 4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 65535), min_size=16, max_size=16))
def test_sixteen_bits_are_divided_by_257(values):
    deep = np.array(values, np.uint16).reshape(4, 4)
    assert (grey(decoded(Image.fromarray(deep), "PNG")) == np.round(deep / 257)).all()


def test_big_endian_sixteen_bits():
    deep = np.round(RAMP * 65535).astype(">u2")
    image = Image.frombytes("I;16B", (4, 4), deep.tobytes())
    assert (grey(decoded(image, "TIFF")) == EIGHT).all()


def test_floats_from_zero_to_one():
    assert (grey(decoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF")) == EIGHT).all()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (RAMP * 255, r"floats from 0 to 255, not from 0 to 1"),
        (RAMP - 0.5, r"floats from -0.5 to 0.5"),
        (np.full((4, 4), np.nan), r"floats from nan to nan"),
        ((RAMP * 1e6).astype(np.int32), r"32-bit integers, whose range is not known"),
    ],
)
def test_values_without_a_range_are_refused_by_name(values, reason):
    values = values.astype(np.float32) if values.dtype == float else values
    with pytest.raises(UserError, match=rf"cannot read the image picture \({reason}.*convert") as error:
        decoded(Image.fromarray(values), "TIFF")
    assert "\n" not in str(error.value)


def test_lab_is_refused_by_name():
    with pytest.raises(UserError, match="colour mode LAB"):
        decoded(Image.new("LAB", (4, 4)), "TIFF")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_exif_turns_the_picture(orientation, format):
    """The picture is saved rotated, as a camera saves it, and is read upright."""
    upright = np.stack([EIGHT, np.flipud(EIGHT), np.full_like(EIGHT, 60)], -1)
    turned = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    image = Image.fromarray(np.ascontiguousarray(turned))
    exif = image.getexif()
    exif[0x0112] = orientation
    options = {"exif": exif, **({"lossless": True} if format == "WEBP" else {})}
    if format == "TIFF":
        tags = TiffImagePlugin.ImageFileDirectory_v2()
        tags[0x0112] = orientation
        options = {"tiffinfo": tags}
    assert (decoded(image, format, **options) == upright).all()


def test_transparent_parts_show_white():
    colour = np.dstack([EIGHT, EIGHT, EIGHT, np.full_like(EIGHT, 255)])
    colour[:2, :, 3] = 0
    colour[2, :, 3] = 128
    found = grey(decoded(Image.fromarray(colour), "PNG"))
    assert (found[:2] == 255).all()
    assert (found[3] == EIGHT[3]).all()
    assert np.abs(found[2] - (EIGHT[2] * (128 / 255) + 255 * (127 / 255))).max() <= 1


@pytest.mark.parametrize("mode", ["LA", "PA-like palette", "L key", "RGB key"])
def test_every_kind_of_transparency_is_seen(mode):
    if mode == "LA":
        image, options = Image.fromarray(np.dstack([EIGHT, np.zeros_like(EIGHT)])), {}
    elif mode == "PA-like palette":
        image, options = Image.new("P", (4, 4), 3), {"transparency": 3}
        image.putpalette([index for index in range(256) for _ in range(3)])
    elif mode == "L key":
        image, options = Image.new("L", (4, 4), 9), {"transparency": 9}
    else:
        image, options = Image.new("RGB", (4, 4), (9, 8, 7)), {"transparency": (9, 8, 7)}
    assert (decoded(image, "PNG", **options) == 255).all()


def test_palettes_and_two_colours():
    image = Image.fromarray((EIGHT // 17).astype(np.uint8), "P")
    image.putpalette([value for index in range(16) for value in (255 - index, index, 7)])
    found = decoded(image, "PNG")
    assert (found[..., 0] == 255 - EIGHT // 17).all()
    assert (found[..., 2] == 7).all()
    assert set(grey(decoded(Image.fromarray(EIGHT > 100), "PNG")).flatten()) == {0, 255}


@pytest.mark.parametrize("format", ["TIFF", "JPEG"])
def test_cmyk(format):
    ink = Image.new("CMYK", (4, 4), (0, 255, 255, 0))  # magenta and yellow make red
    options = {"quality": 100} if format == "JPEG" else {}
    assert np.abs(decoded(ink, format, **options) - [255, 0, 0]).max() <= 3


def test_no_image_at_all_is_refused_by_name(tmp_path):
    file = tmp_path / "note.png"
    file.write_text("not an image")
    with pytest.raises(UserError, match=r"note.png \(not an image that Pillow knows\); replace or remove it"):
        decode(file, 4)
