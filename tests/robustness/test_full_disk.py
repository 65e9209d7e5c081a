"""Errors of a disk name the file, and those of the server its machine; advice says what to do."""

import errno
import resource
import socket

import numpy as np
import pytest
import torch

from clients.store import ClientStore
from fedsim.apps.server import marked
from fedsim.common.errors import USER_ERROR, UserError
from fedsim.common.files import atomic_write, remove_unfinished, writing
from fedsim.deploy.runtime import failure
from fedsim.records.csv_file import CsvFile
from fedsim.runs.checkpoint import write_arrays

LIMIT = 10_000  # bytes of a file


@pytest.fixture
def full(monkeypatch):
    """No file may grow beyond some bytes, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_text(file):
    atomic_write(file, "x" * 2 * LIMIT)


def write_rows(file):
    CsvFile(file, ["round"]).append([{"round": "1" * 2 * LIMIT}])


def write_model(file):
    write_arrays(file, {"weight": np.zeros(LIMIT)})


@pytest.mark.parametrize("write", [write_text, write_rows, write_model])
def test_an_error_of_the_disk_names_the_file(write, full, tmp_path):
    file = tmp_path / "record"
    with pytest.raises(OSError, match="File too large") as error:
        write(file)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(file))
    with pytest.raises(UserError) as line, marked():
        write(file)
    assert str(line.value).startswith(f"{USER_ERROR}the server {socket.gethostname()}: {file}: File too large; correct")


def test_a_clients_state_names_the_file_and_leaves_no_part_of_it(full, tmp_path):
    store = ClientStore(tmp_path, "photo", "a")
    store.open_round(1)
    store.put("personal", {"weight": torch.zeros(LIMIT)})
    with pytest.raises(OSError, match="File too large") as error:
        store.commit()
    assert error.value.filename == str(tmp_path / "personal-000001.safetensors")
    assert not list(tmp_path.glob(".*"))


def test_other_errors_stay_as_they_are(tmp_path):
    for error in (OSError("no number"), FileNotFoundError(errno.ENOENT, "gone", "other"), ValueError("a value")):
        with pytest.raises(type(error)) as raised, writing(tmp_path / "record"):
            raise error
        assert raised.value is error


def test_what_a_killed_writer_of_tensors_leaves_is_removed(tmp_path):
    for name in (".tmpAb12Cd", ".tmp", ".tmpAb12Cde", ".notes.tmpAb12Cd"):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.tmpAb12Cd", ".tmp", ".tmpAb12Cde"]


def test_a_stopped_server_app_says_that_the_same_command_continues():
    text = str(failure("finished:failed", "No heartbeat received from the task"))
    assert text.startswith("No heartbeat received from the task: the server app gave no sign for a minute")
    assert text.endswith("the same command continues the run")
    assert str(failure("finished:failed", "ServerApp failed with exception: photo: gone")) == "photo: gone"


def test_a_run_that_the_superlink_has_forgotten_says_why_and_what_to_do():
    text = str(failure("unknown", "[code: 16] Run ID not found"))
    assert text.startswith("the SuperLink does not know this run ([code: 16] Run ID not found): its state is older")
    assert text.endswith("the same command submits the run anew, which goes on from its last checkpoint")
