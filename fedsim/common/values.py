"""Names for values whose type is known only when the program runs."""

from typing import Any, TypeAlias

Json: TypeAlias = Any  # what JSON, TOML and the command line can hold: numbers, texts, lists and tables of them
JsonTable: TypeAlias = dict[str, Any]
Row: TypeAlias = dict[str, Any]  # of a CSV file: numbers and texts by column
