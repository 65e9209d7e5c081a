"""Checkpoints: the global model and the server's state after a finished round, from which a killed run resumes."""

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write, file_mode, writing
from fedsim.common.values import JsonTable
from fedsim.data.fingerprint import Fingerprints
from fedsim.runs.origin import Origin, metadata_of
from strategies.parts import ArrayDict, Entries
from strategies.state import ServerState

FOLDER = "checkpoint"  # in a run's folder
STATE = "checkpoint.safetensors"
TOKEN = "token"
PLAIN = ("layouts", "handed", "stored")  # fields of ServerState that JSON holds as they are


@dataclass
class Checkpoint:
    """The global model and the server's state after `round`. Everything else of a run follows from its settings."""

    round: int
    arrays: dict[str, np.ndarray]
    state: ServerState
    data: Fingerprints = field(default_factory=dict)  # fingerprint of every domain


def unfinished(path: Path) -> Path:
    """Path of the temporary file that later replaces `path`.

    Its name is always the same, so the file that a killed process left behind is overwritten. Only one process writes
    to a run's folder.
    """
    return path.with_name(f".{path.name}.tmp")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file atomically: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = unfinished(path)
    with writing(path):
        in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        save_file(in_order, temporary, metadata=metadata)
    temporary.chmod(file_mode())  # safetensors makes files that only their owner can read
    temporary.replace(path)


def arrays_file(folder: Path, round: int) -> Path:
    """File of a checkpoint's global arrays."""
    return folder / f"arrays-{round:06d}.safetensors"


def save_checkpoint(folder: Path, checkpoint: Checkpoint, origins: Sequence[Origin] = ()) -> Path:
    """Writes the arrays into a file named after their round, then atomically the file that names this round.

    Returns the path of the arrays' file. It is an ordinary model file, so that `best.safetensors` can be a link to it.
    origins: the runs that trained the model
    """
    file = arrays_file(folder, checkpoint.round)
    write_arrays(file, checkpoint.arrays, metadata_of(checkpoint.round, origins))
    state = checkpoint.state
    tensors: dict[str, np.ndarray] = {}
    banks: dict[str, dict[str, list[str]]] = {}  # the names of the tensors, by bank and owner
    for bank, owners in state.banks.items():
        banks[bank] = {owner: list(arrays) for owner, arrays in owners.items()}
        for owner, arrays in owners.items():
            tensors |= {json.dumps([bank, owner, name]): array for name, array in arrays.items()}
    for part, arrays in state.tensors.items():
        tensors |= {json.dumps([part, name]): array for name, array in arrays.items()}
    meta = {
        "round": checkpoint.round,
        "data": checkpoint.data,
        "order": list(checkpoint.arrays),
        "parts": state.parts,
        "tensors": {part: list(arrays) for part, arrays in state.tensors.items()},
        "banks": banks,
        **{name: getattr(state, name) for name in PLAIN},
    }
    write_arrays(folder / STATE, tensors, {"fedsim": json.dumps(meta)})
    for old in folder.glob("arrays-*.safetensors"):
        if old != file:
            old.unlink()
    return file


def run_token(folder: Path) -> str:
    """Random text that marks the messages and client states of this run; made at its start and kept for resuming."""
    file = folder / TOKEN
    if not file.is_file():
        atomic_write(file, secrets.token_hex(8))
    return file.read_text()


def link_file(source: Path, target: Path) -> None:
    """Gives a file a second name atomically; on a file system without links the file is copied."""
    temporary = unfinished(target)
    temporary.unlink(missing_ok=True)
    try:
        temporary.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, temporary)
    temporary.replace(target)
    temporary.unlink(missing_ok=True)  # POSIX: renaming one of a file's names to another of them changes nothing


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """Returns the checkpoint, or None when there is none; raises UserError when its files cannot be read."""
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            meta = json.loads(file.metadata()["fedsim"])
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        arrays = load_file(arrays_file(folder, meta["round"]))
        state = state_of(meta, tensors)
        model = {name: arrays[name] for name in meta["order"]}
        return Checkpoint(meta["round"], model, state, meta["data"])
    except Exception as error:
        raise UserError(f"{path} is not a readable checkpoint ({error}); remove the run's folder") from None


def state_of(meta: JsonTable, tensors: Mapping[str, np.ndarray]) -> ServerState:
    """Returns the server's state of a checkpoint.

    meta: what the metadata of its file say. tensors: all tensors of the file
    """
    of_parts: dict[str, ArrayDict] = {}
    for part, names in meta["tensors"].items():
        of_parts[part] = {name: tensors[json.dumps([part, name])] for name in names}
    banks: dict[str, Entries] = {}
    for bank, owners in meta["banks"].items():
        entries: dict[str, ArrayDict] = {}
        for owner, names in owners.items():
            entries[owner] = {name: tensors[json.dumps([bank, owner, name])] for name in names}
        banks[bank] = entries
    plain = {name: meta[name] for name in PLAIN}
    return ServerState(parts=meta["parts"], tensors=of_parts, banks=banks, **plain)
