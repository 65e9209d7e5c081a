"""What a client keeps between rounds: named entries of tensors, versioned by round, in memory and in atomic files.

The state at the start of round t is what was stored before t. An interrupted round leaves a newer version behind
that is ignored when the round is taken again, so that a resumed run equals the unbroken one. The files are the truth,
memory their cache: Flower's engine serves a client now from this process, now from that.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, Tensor]


class ClientStore:
    """Entries {name: {tensor name: tensor}} of one client; `folder=None` keeps them in memory only."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._entries: dict[str, list[tuple[int, State]]] = {}
        self._pending: dict[str, State] = {}
        self._round = 0
        self._stamps: dict[tuple[str, int], int] = {}  # of the files that memory holds, by entry and version
        self._catch_up()

    def open_round(self, round: int) -> None:
        """Make what was stored before `round` visible; later versions (of an interrupted attempt) are dropped."""
        self._pending.clear()
        self._round = round
        self._catch_up()
        for name, versions in self._entries.items():
            for version, _ in [entry for entry in versions if entry[0] >= round]:
                self._remove(name, version)
            self._entries[name] = [entry for entry in versions if entry[0] < round]

    def get(self, name: str) -> State | None:
        """Entry staged in this round, else the newest stored before it; None on the first participation."""
        if name in self._pending:
            return self._pending[name]
        versions = self._entries.get(name)
        return versions[-1][1] if versions else None

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Stage an entry (copied to the CPU); it takes effect with `commit`."""
        self._pending[name] = {
            key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()
        }

    def get_number(self, name: str) -> float | None:
        """A stored scalar, or None."""
        entry = self.get(name)
        return None if entry is None else float(entry["value"])

    def put_number(self, name: str, value: float) -> None:
        """Stage a scalar."""
        self.put(name, {"value": torch.tensor(value, dtype=torch.float64)})

    def commit(self) -> None:
        """Write the staged entries as versions of the open round; the two newest versions are kept."""
        for name, tensors in self._pending.items():
            if self._folder is not None:
                self._write(name, tensors)
            versions = self._entries.setdefault(name, [])
            versions.append((self._round, tensors))
            for version, _ in versions[:-2]:
                self._remove(name, version)
            del versions[:-2]
        self._pending.clear()

    def _catch_up(self) -> None:
        """Take over what another process has stored or removed since."""
        if self._folder is None:
            return
        files = {(name, version): path for name, version, path in self._files()}
        for name, versions in self._entries.items():
            self._entries[name] = [entry for entry in versions if (name, entry[0]) in files]
        for (name, version), path in files.items():
            stamp = path.stat().st_mtime_ns
            if self._stamps.get((name, version)) != stamp:
                others = [entry for entry in self._entries.get(name, []) if entry[0] != version]
                self._entries[name] = sorted([*others, (version, load_file(path))], key=lambda entry: entry[0])
                self._stamps[name, version] = stamp

    def _path(self, name: str, version: int) -> Path:
        return self._folder / f"{name}-{version:06d}.safetensors"

    def _files(self) -> list[tuple[str, int, Path]]:
        pattern = re.compile(r"(.+)-(\d{6})\.safetensors")
        if not self._folder.is_dir():
            return []
        found = [(match, path) for path in sorted(self._folder.iterdir()) if (match := pattern.fullmatch(path.name))]
        return [(match[1], int(match[2]), path) for match, path in found]

    def _write(self, name: str, tensors: State) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{name}.{os.getpid()}.tmp"
        save_file(tensors, temporary, metadata={"entry": json.dumps(name)})
        path = temporary.replace(self._path(name, self._round))
        self._stamps[name, self._round] = path.stat().st_mtime_ns

    def _remove(self, name: str, version: int) -> None:
        self._stamps.pop((name, version), None)
        if self._folder is not None:
            self._path(name, version).unlink(missing_ok=True)


def client_folder(state: str, client: str) -> Path | None:
    """Folder of one client's state below the run's (or site's) state folder; None when there is none."""
    return Path(state) / client.replace("/", "-") if state else None
