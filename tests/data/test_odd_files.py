"""Files that are unusual or damaged: their pixels are right, or they are refused by name."""

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.data.inspect import inspect
from fedsim.data.mask_folders import decode_mask
from fedsim.data.pixels import decode, read_bytes
from fedsim.settings import DataSettings, data_root
from fedsim.settings.experiment import parse_experiment


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
        planes, _ = decode_mask(Path("x.tif"), 4, tiff(300, 1, type), {"disc": [300], "cup": [44]})
        assert planes.mean((1, 2)).tolist() == [1, 0]


def test_any_error_of_pillow_names_the_file(monkeypatch):
    def fail(*_):
        raise OverflowError("too large")

    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    monkeypatch.setattr(Image.Image, "load", fail)
    for read in (decode, lambda *given: decode_mask(*given, {"disc": [0]})):
        with pytest.raises(UserError, match=r"cannot read the image x.png \(too large\)"):
            read(Path("x.png"), 8, file.getvalue())


def test_what_cannot_be_read_to_an_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for name, said in (("pipe.png", "a pipe"), ("a\0b.png", "null byte"), ("no.png", "No such file")):
        with pytest.raises(UserError, match=f"cannot read the image .*{said}"):
            read_bytes(tmp_path / name)


@pytest.mark.parametrize(("files", "said"), [
    (["Train/0.png", "val/0.png", "test/0.png"], "Train, test, val, which are parts of a split"),
    (["train/0.png", "car/0.png", "__background__/0.png"], ""),
    (["a/0.png", "b/0.png", "__MACOSX/0.png"], ""),
])  # fmt: skip
def test_folders_of_a_split_are_no_classes_and_a_background_is_one(tmp_path, files, said):
    """Without a word a network would learn to tell training images from test images."""
    for file in (tmp_path / domain / file for domain in ("x", "y") for file in files):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(file)
    data = DataSettings(dataset="folder", root=str(tmp_path))
    if said:
        for read in (lambda: benchmark(data), lambda: inspect(tmp_path)):
            with pytest.raises(UserError, match=said):
                read()
    else:
        assert benchmark(data).classes == tuple(sorted(Path(file).parent.name for file in files if "MAC" not in file))


def test_home_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_experiment("", ["run.output=~/out"]).run.output == "/home/me/out"
    assert str(data_root(DataSettings(root="~/images"))) == "/home/me/images"
    with pytest.raises(UserError, match="~nobody-here/x: no home folder is known"):
        data_root(DataSettings(root="~nobody-here/x"))
