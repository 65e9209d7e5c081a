"""One atomic file that a killed run resumes from: global arrays, banks and the parts' states of a finished round."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from fedsim.errors import UserError

ARRAY, BANK = "array:", "bank:"


@dataclass
class Checkpoint:
    """State of the server after `round`; everything else of a run is derived from its settings."""

    round: int
    arrays: dict[str, np.ndarray]
    banks: dict[str, dict[str, dict[str, np.ndarray]]]
    part_states: dict[str, dict[str, Any]]


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, temporary, metadata=metadata)
    temporary.replace(path)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically."""
    tensors = {ARRAY + name: array for name, array in checkpoint.arrays.items()}
    for bank, clients in checkpoint.banks.items():
        for client, arrays in clients.items():
            tensors |= {f"{BANK}{json.dumps([bank, client, name])}": array for name, array in arrays.items()}
    meta = {
        "round": checkpoint.round,
        "part_states": checkpoint.part_states,
        "order": list(checkpoint.arrays),
        "banks": {bank: list(clients) for bank, clients in checkpoint.banks.items()},
    }
    write_arrays(path, tensors, {"fedsim": json.dumps(meta)})


def load_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint, or None when there is none; UserError when the file is not one of ours."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            meta = json.loads(file.metadata()["fedsim"])
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except Exception as error:
        raise UserError(
            f"{path} is not a readable checkpoint ({error}); remove the run's folder to start again"
        ) from None
    banks: dict = {bank: {client: {} for client in clients} for bank, clients in meta["banks"].items()}
    for name in [name for name in tensors if name.startswith(BANK)]:
        bank, client, key = json.loads(name.removeprefix(BANK))
        banks[bank][client][key] = tensors[name]
    return Checkpoint(
        meta["round"], {name: tensors[ARRAY + name] for name in meta["order"]}, banks, meta["part_states"]
    )
