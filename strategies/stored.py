"""The tensors of a round's replies: a few in memory, all others in a file, read back tensor by tensor or in parts.

The server cannot add a reply to the average when it arrives: the weights, the limit on updates and the parts that
compare clients need the numbers of all replies first. So every reply is checked and measured when it arrives, and its
tensors are stored here. Code that reads them later gets normal mappings {name: array}. If it keeps at most one tensor
(or a part of one) of each client, it needs little memory, whatever the number of clients.

The file has no name: its space is free again when the process ends. The next round writes over its start, which takes
half the time of new space; what is longer than KEPT_BYTES is given back when the round ends.
"""

import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedsim.common.errors import UserError

MEMORY_BYTES = 64 * 2**20  # of a round's tensors that stay in memory
WHOLE_BYTES = 256 * 2**20  # a round whose tensors take at most this together stays in memory as a whole
KEPT_BYTES = 512 * 2**20  # of the file that wait for the next round

Head = tuple[tuple[int, ...], np.dtype]  # shape and type of a tensor
Heads = Mapping[str, Head]  # by the names of the tensors
Piece = tuple[str, int, int]  # part of a flattened tensor: name, start, stop


class StoredArrays(Mapping[str, np.ndarray]):
    """Tensors in a file. Every access to a tensor reads it again; `heads` has shapes and types without reading."""

    def __init__(self, storage: "Storage", heads: Heads, places: Mapping[str, int]) -> None:
        self.heads = dict(heads)
        self._storage, self._round, self._places = storage, storage.round, dict(places)

    def __getitem__(self, name: str) -> np.ndarray:
        shape, dtype = self.heads[name]
        array = np.empty(shape, dtype)
        self._read(array.reshape(-1), self._places[name])
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def fill(self, pieces: Sequence[Piece], out: np.ndarray) -> None:
        """Write parts of tensors one after the other into `out`; neighbours in the file are read together."""
        position = 0
        for start, count, dtype in self._runs(pieces):
            run = np.empty(count, dtype)
            self._read(run, start)
            out[position : position + count] = run
            position += count

    def _runs(self, pieces: Sequence[Piece]) -> list[tuple[int, int, np.dtype]]:
        """Neighbouring pieces of one type joined: (first byte, number of values, type)."""
        runs: list[tuple[int, int, np.dtype]] = []
        for name, start, stop in pieces:
            dtype = self.heads[name][1]
            first = self._places[name] + start * dtype.itemsize
            if runs and runs[-1][2] == dtype and runs[-1][0] + runs[-1][1] * dtype.itemsize == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + stop - start, dtype)
            else:
                runs.append((first, stop - start, dtype))
        return runs

    def _read(self, array: np.ndarray, start: int) -> None:
        if self._round != self._storage.round:
            raise RuntimeError("tensors of an earlier round are read, and the next round has written over them")
        view, file = memoryview(array.view(np.uint8)), self._storage.file
        assert file is not None  # this round's tensors are in it
        while len(view):
            count = os.preadv(file.fileno(), [view], start)
            if not count:
                raise EOFError("the file of this round's replies ends too early")
            view, start = view[count:], start + count


class Storage:
    """Keeps the tensors of one round after the other; `folder` is where the file is made (None: the system's)."""

    def __init__(self, folder: Path | None = None, memory: int = MEMORY_BYTES) -> None:
        self.folder, self.memory = folder, memory
        self._room = memory
        self.file: io.FileIO | None = None
        self.round = 0  # counted, so that nobody reads what is written over
        self._held = self._end = 0

    def expect(self, size: int) -> None:
        """Say before the first reply how many bytes the round's replies take together."""
        self._room = size if self.memory < size <= WHOLE_BYTES else self.memory

    def put(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The same tensors: unchanged while there is room in memory, otherwise stored in the file from now on."""
        size = sum(array.nbytes for array in arrays.values())
        if not size:
            return arrays
        if self._held + size <= self._room:
            self._held += size
            return arrays
        return self._write(arrays)

    def clear(self) -> None:
        """Forget the round. Its stored tensors must not be read any more."""
        if self.file is not None and self._end > KEPT_BYTES:
            self.file.truncate(KEPT_BYTES)
        self.round += 1
        self._held = self._end = 0

    def close(self) -> None:
        """Give the file back, at the end of a run."""
        self.clear()
        if self.file is not None:
            self.file.close()
        self.file = None

    def _write(self, arrays: Mapping[str, np.ndarray]) -> StoredArrays:
        heads = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        places = {}
        try:
            if self.file is None:
                self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - until `close`
            for name in sorted(arrays):  # the order in which averages read them
                places[name] = self._end
                view = memoryview(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8))
                while len(view):
                    count = os.pwrite(self.file.fileno(), view, self._end)
                    view, self._end = view[count:], self._end + count
        except OSError as error:
            where = self.folder or tempfile.gettempdir()
            raise UserError(
                f"{where}: the replies of a round cannot be written to a temporary file ({error.strerror}); "
                f"it already holds {self._end / 1e9:.1f} GB. Free some space, or choose another --output"
            ) from None
        return StoredArrays(self, heads, places)


def heads_of(arrays: Mapping[str, np.ndarray]) -> dict[str, Head]:
    """Shape and type of every tensor by name; of stored ones without reading them."""
    if isinstance(arrays, StoredArrays):
        return arrays.heads
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}
