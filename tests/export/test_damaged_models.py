"""A model or a record next to it that was cut off, garbled or is of another type: one line that names the file."""

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner
from untrained_run import untrained_run

from fedsim.commands.cli import app
from fedsim.common.errors import UserError

DEEP = b"[" * 100_000
DAMAGES = {
    "cut off": lambda data: data[: len(data) // 2 - 3],
    "empty": lambda data: b"",
    "brackets": lambda data: DEEP,
    "list": lambda data: b"[1, 2]\n",
    "number": lambda data: b"5\n",
    "no text": lambda data: b"\xff\xfe\x00" + data,
}
FILES = ("best.safetensors", "environment.json", "experiment.toml")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = untrained_run(tmp_path_factory.mktemp("whole") / "seed0", run={"target": "rot45", "threads": 1})
    Image.fromarray(np.zeros((28, 28), dtype=np.uint8)).save(folder / "image.png")
    return folder


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "seed0")


def words_of(verb, folder):
    return [verb, str(folder), *([str(folder / "image.png")] if verb == "predict" else [])]


def test_the_whole_run_predicts_and_is_evaluated(run):
    for verb in ("predict", "evaluate"):
        assert CliRunner().invoke(app, words_of(verb, run)).exit_code == 0


@pytest.mark.parametrize("verb", ["predict", "evaluate", "export", "features"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_each_damage_is_one_line_with_the_file(name, damage, verb, copied):
    file = copied / name
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    error = CliRunner().invoke(app, words_of(verb, copied)).exception
    assert isinstance(error, UserError), error
    assert str(error).startswith(f"{file}: ")
    assert "copy the file again" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("verb", ["predict", "evaluate", "export", "features"])
def test_a_model_that_is_a_link_to_no_file_says_so(verb, copied):
    file = copied / "best.safetensors"
    file.unlink()
    file.symlink_to("elsewhere/arrays.safetensors")
    error = CliRunner().invoke(app, words_of(verb, copied)).exception
    assert isinstance(error, UserError)
    assert f"{file} cannot be read: it is a link to elsewhere/arrays.safetensors, where no file is" in str(error)
    assert "copy the model itself" in str(error)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(FILES), start=st.floats(0, 1), length=st.integers(0, 40), put=st.binary(max_size=8))
def test_any_damage_predicts_or_is_one_line(name, start, length, put, run):
    """A part of a file, at any place, is replaced by anything; half of the places are in the first 2,000 bytes."""
    file = run / name
    data = file.read_bytes()
    place = int(start * 2 * min(len(data), 2000)) if start < 0.5 else int(start * len(data))
    file.write_bytes(data[:place] + put + data[place + length :])
    try:
        error = CliRunner().invoke(app, words_of("predict", run)).exception
    finally:
        file.write_bytes(data)
    assert error is None or (isinstance(error, UserError) and "\n" not in str(error)), error
