"""Reads a file of a run's folder whatever has happened to it: every damage is one UserError that names the file."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedsim.common.errors import UserError, first_line

AGAIN = "copy the file again, or remove the run's folder and repeat the run"
# What readers of JSON, TOML, CSV and tensors raise for a file that was cut off, is nested deeply or of another type.
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
    SafetensorError,
    csv.Error,
)


@contextmanager
def named(file: Path, what: str = "the file") -> Iterator[None]:
    """Turn every error that a damaged file causes in the block into a UserError with the file's name and what to do.

    what: what the file holds, e.g. `the settings`
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"{file}: {what} cannot be read ({error.strerror or error}){link_text(file)}; {AGAIN}"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: it is not text in UTF-8; {AGAIN}") from None
    except DAMAGE as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        raise UserError(
            f"{file}: {what} cannot be read, so that it was cut off or changed ({reason}); {AGAIN}"
        ) from None


def read_text(file: Path) -> str:
    """Return the text of a file in UTF-8, without the mark that spreadsheets write at its start."""
    with named(file):
        return file.read_text(encoding="utf-8-sig")


def read_json(file: Path) -> Any:
    """Return the value of a JSON file; UserError also for one that is nested more deeply than about 200 levels."""
    with named(file):
        return from_json(file.read_bytes())


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file by name."""
    with named(file, "the tensors"):
        return load_file(file)


def link_text(file: Path) -> str:
    """Return where a link leads that leads to no file, as a part of an error message; empty for everything else."""
    if not file.is_symlink() or file.exists():
        return ""
    return f": it is a link to {file.readlink()}, where no file is"
