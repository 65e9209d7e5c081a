"""What a client keeps between rounds: named entries of tensors, versioned by round, in memory and in atomic files.

The state at the start of round t is what was stored before t. An interrupted round leaves a newer version, which is
ignored when the round is repeated, so that a resumed run equals the unbroken one. The same holds for a version that
belongs to a reply which the server did not take (refused, lost, or too late). The files are authoritative and memory is
their cache, because Flower's engine may serve a client from another process in each round.

A folder belongs to one client of one run (`owner.json`). The server tells the client the last round of the state that
it counts on. A state of another client or run, or one that is older (a restored backup, an emptied folder), is refused
in one line.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write, writing
from fedsim.models.weights import StateDict
from fedsim.tensors.arrays import moved

OWNER = "owner.json"
TEMPORARY = re.compile(r"\.(\d{1,9})\.tmp")  # a folder, with the number of the process that writes in it
VERSIONED = re.compile(r"(.+)-(\d{6})\.safetensors")


class ClientStore:
    """Entries {name: {tensor name: tensor}} of one client; `folder=None` keeps them in memory only.

    `client` and `run` (the run's token) are the owner of the state. A folder with another owner is a UserError.
    """

    def __init__(self, folder: Path | None, client: str = "", run: str = "") -> None:
        self._folder = folder
        self._owner = {"client": client, "run": run}
        self._entries: dict[str, list[tuple[int, StateDict]]] = {}
        self._pending: dict[str, StateDict] = {}
        self._round = 0
        self._saved = -1
        self.peers: Path | None = None  # the file of a site's kit with the public keys of all sites
        self._passed: dict[str, tuple[int, str]] = {}  # text by name, with the round that it is for
        # Times of the last change of the files that memory holds, by entry and version.
        self._stamps: dict[tuple[str, int], int] = {}
        self._catch_up()
        self._remove_leftovers()

    @property
    def run(self) -> str:
        """The token of the run that owns the state."""
        return self._owner["run"]

    def open_round(self, round: int, counted: int | None = None, saved: int | None = None) -> None:
        """Makes what was stored before `round` visible. Later versions, of an interrupted attempt, are dropped.

        counted: the newest round with a state that the server counts on (-1: none). Newer versions go with replies that
        it did not take, and are dropped; UserError when the state here is older. None: everything counts
        saved: the newest round from which the server could resume (default: the one before)
        """
        self._pending.clear()
        self._round = round
        self._saved = round - 1 if saved is None else saved
        self._catch_up()
        first = round if counted is None else min(round, counted + 1)  # of the versions that are dropped
        for name, versions in self._entries.items():
            for version, _ in [entry for entry in versions if entry[0] >= first]:
                self._remove(name, version)
            self._entries[name] = [entry for entry in versions if entry[0] < first]
        newest = max((versions[-1][0] for versions in self._entries.values() if versions), default=-1)
        if counted is not None and newest < counted:
            state = f"is of round {newest}" if newest >= 0 else "is missing"
            raise UserError(
                f"the state of client {self._owner['client']!r} {state}{self._where()}, but the server counts on that "
                f"of round {counted}; put the newer state back, or start the run anew in another output folder"
            )

    def get(self, name: str) -> StateDict | None:
        """The entry staged in this round, else the newest stored before it; None on the first participation."""
        if name in self._pending:
            return self._pending[name]
        versions = self._entries.get(name)
        return versions[-1][1] if versions else None

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Stages an entry (copied to the CPU); `commit` stores it."""
        here = moved(tensors, torch.device("cpu"))
        self._pending[name] = {key: tensor.clone().contiguous() for key, tensor in here.items()}

    def get_number(self, name: str) -> float | None:
        """A stored scalar, or None."""
        entry = self.get(name)
        return None if entry is None else float(entry["value"])

    def put_number(self, name: str, value: float) -> None:
        """Stages a scalar."""
        self.put(name, {"value": torch.tensor(value, dtype=torch.float64)})

    def pass_on(self, round: int, name: str, text: str) -> None:
        """Keep a text for the later messages of a round, which another process may serve; "" removes it.

        It is no state: nothing of it counts once the round is over. Its file can be read by its owner alone.
        """
        if self._folder is None:
            self._passed[name] = round, text
            return
        path = self._folder / f"{name}.json"
        if not text:
            path.unlink(missing_ok=True)
            return
        self._claim()
        atomic_write(path, json.dumps({"round": round, "text": text}), mode=0o600)

    def passed_on(self, round: int, name: str) -> str:
        """The text of that name that an earlier message of the round kept; "" when there is none."""
        of_round, text = self._passed.get(name, (round, ""))
        if self._folder is not None:
            try:
                stored = json.loads((self._folder / f"{name}.json").read_text())
            except (FileNotFoundError, ValueError):
                return ""
            of_round, text = stored["round"], stored["text"]
        return text if of_round == round else ""

    def commit(self) -> int:
        """Writes the staged entries as versions of the open round and returns their number.

        Three versions can be needed later and are kept: the newest of a saved round, for a resumed run; the one before
        this round, for a reply that the server does not take; and this one.
        """
        count = len(self._pending)
        for name, tensors in self._pending.items():
            if self._folder is not None:
                self._write(name, tensors)
            versions = self._entries.setdefault(name, [])
            versions.append((self._round, tensors))
            present = [version for version, _ in versions]
            saved = max((version for version in present if version <= self._saved), default=-1)
            before = max((version for version in present if version < self._round), default=-1)
            needed = {saved, before, self._round}
            for version in set(present) - needed:
                self._remove(name, version)
            self._entries[name] = [entry for entry in versions if entry[0] in needed]
        self._pending.clear()
        return count

    def _catch_up(self) -> None:
        """Reads what another process has stored or removed in the meantime."""
        if self._folder is None:
            return
        if not self._folder.is_dir():  # most clients of most methods keep nothing
            self._entries, self._stamps = {name: [] for name in self._entries}, {}
            return
        self._check_owner()
        files = self._files()
        for name, versions in self._entries.items():
            self._entries[name] = [entry for entry in versions if (name, entry[0]) in files]
        for (name, version), path in files.items():
            stamp = path.stat().st_mtime_ns
            if self._stamps.get((name, version)) != stamp:
                others = [entry for entry in self._entries.get(name, []) if entry[0] != version]
                self._entries[name] = sorted([*others, (version, read_state(path))], key=lambda entry: entry[0])
                self._stamps[name, version] = stamp

    def _at(self) -> Path:
        assert self._folder is not None  # nothing is written where memory alone keeps it
        return self._folder

    def _path(self, name: str, version: int) -> Path:
        return self._at() / f"{name}-{version:06d}.safetensors"

    def _files(self) -> dict[tuple[str, int], Path]:
        """The state files by entry and version."""
        matches = [(VERSIONED.fullmatch(path.name), path) for path in sorted(self._at().iterdir())]
        return {(match[1], int(match[2])): path for match, path in matches if match}

    def _write(self, name: str, tensors: StateDict) -> None:
        self._claim()
        path, aside = self._path(name, self._round), self._at() / f".{os.getpid()}.tmp"
        aside.mkdir(exist_ok=True)  # safetensors writes under a random name next to the file, which a kill would leave
        try:
            with writing(path):
                save_file(tensors, aside / path.name, metadata={"entry": json.dumps(name)})
            (aside / path.name).replace(path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._stamps[name, self._round] = path.stat().st_mtime_ns

    def _remove_leftovers(self) -> None:
        """Remove what processes that are gone were writing when they were killed."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in list(self._folder.glob(".*.tmp")):
            process = TEMPORARY.fullmatch(path.name)
            if process and not is_alive(int(process[1])):
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, name: str, version: int) -> None:
        self._stamps.pop((name, version), None)
        if self._folder is not None:
            self._path(name, version).unlink(missing_ok=True)

    def _claim(self) -> None:
        """Writes the owner of this folder into it, before anything else."""
        if not (self._at() / OWNER).is_file():
            atomic_write(self._at() / OWNER, json.dumps(self._owner))

    def _check_owner(self) -> None:
        try:
            owner = json.loads((self._at() / OWNER).read_text())
        except FileNotFoundError:
            owner = {"client": "an unknown client", "run": "unknown"} if self._files() else self._owner
        except (ValueError, RecursionError):
            owner = None
        if not isinstance(owner, dict):
            owner = {"client": "an unreadable owner", "run": "unknown"}
        if owner != self._owner:
            raise UserError(
                f"{self._folder} holds the state of {owner.get('client')!r} in run {owner.get('run')!r}, not that of "
                f"{self._owner['client']!r} in run {self._owner['run']!r}; use another state folder, or remove this "
                "one if its run is over"
            )

    def _where(self) -> str:
        return f" in {self._folder}" if self._folder else ""


def is_alive(process: int) -> bool:
    """Return whether a process of this number is there."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process; a number that no process can have
        return True
    return True


def read_state(path: Path) -> StateDict:
    """The tensors of a state file. Raises UserError when it is damaged."""
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises its own errors and OSError
        raise UserError(
            f"{path} is not a readable state file ({error}); put a copy of it back, or start anew"
        ) from None


def newest_entry(folder: Path, name: str, most: int = 999_999) -> StateDict | None:
    """The newest stored version of an entry in a client's folder, up to that of round `most`, or None.

    For readers other than the client. Versions after the round that the server counts on belong to refused replies.
    """
    files = sorted(folder.glob(f"{name}-{'[0-9]' * 6}.safetensors"))
    files = [file for file in files if int(file.stem[-6:]) <= most]
    return read_state(files[-1]) if files else None


def client_folder(state: str, client: str) -> Path | None:
    """The folder of one client's state below the run's (or site's) state folder; None when there is none."""
    return Path(state) / client.replace("/", "-") if state else None
