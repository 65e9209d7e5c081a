"""Two rounds of every row, each as one digest: `python tests/contract/rows.py FILE [NAME=VALUE ...]`.

Run it with another tree before this one on PYTHONPATH and another FILE, and compare the two files: `diff A B`. The
digest covers rounds.csv and clients.csv without times, and every tensor of last.safetensors. NAME=VALUE are settings of
the runs, such as `run.runtime=ray`.
"""

import hashlib
import sys
import tempfile
from pathlib import Path

import pandas as pd
from safetensors.numpy import load_file

from fedsim.methods.table import METHODS
from fedsim.runtime.launch import carry_out
from fedsim.testing.contract import small_plan


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for name in ("rounds.csv", "clients.csv"):
        table = pd.read_csv(folder / name, dtype=str)
        found.update(table[[column for column in table if "seconds" not in column]].to_csv().encode())
    for name, array in sorted(load_file(folder / "last.safetensors").items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:16]


def main(file: str, *settings: str) -> None:
    with Path(file).open("w") as lines, tempfile.TemporaryDirectory() as output:
        for method in METHODS:
            plan = small_plan(method, output, ["train.rounds=2", *settings])
            print(method, digest(carry_out(plan)), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
