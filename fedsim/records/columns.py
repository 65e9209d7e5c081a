"""The rows of a record as columns of numbers: what a run needs of its own records, without the import of pandas."""

from collections.abc import Mapping
from typing import Any, Union

import numpy as np


class Columns:
    """The columns of a record, by name: numbers float64 [N] with NaN in empty cells, or texts.

    It has the part of the interface of pandas' frames that the selection of a round needs.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def of(cls, rows: Union["Columns", Mapping[str, Any]]) -> "Columns":
        """Return columns as they are, and those of a frame, which is a mapping from names to columns."""
        return rows if isinstance(rows, Columns) else cls(rows)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._values.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __len__(self) -> int:
        return len(next(iter(self._values.values()), ()))

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._values[name])

    def numbers(self, name: str) -> np.ndarray:
        """Return a column as float64 [N], with NaN in empty cells."""
        return self[name].astype(np.float64)

    def chosen(self, places: np.ndarray) -> "Columns":
        """Return some of the rows, by a mask [N] or by their places."""
        return Columns({name: self[name][places] for name in self.columns})

    def row(self, place: int) -> dict[str, Any]:
        """Return one row, {column: value}."""
        return {name: self[name][place] for name in self.columns}
