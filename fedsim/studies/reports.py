"""What the reports of searches have in common: percentages, settings to paste, and CSV files that keep other rows."""

import csv
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.settings.experiment import assign, parse_override


def percent(value: float) -> str:
    """Return a fraction as tables print it: `12.5 %`."""
    return f"{100 * value:.1f} %"


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"train.lr": 0.1}` -> `{"train": {"lr": 0.1}}`, as in an experiment file."""
    table: dict[str, Any] = {}
    for key, value in values.items():
        assign(table, key, value)
    return table


def given_settings(overrides: Sequence[str], preset: str) -> list[str]:
    """Return the preset and the overrides of a search, by which its scores differ from those of another one."""
    settings = {parse_override(override)[0]: override for override in overrides}
    settings.pop("run.output", None)
    texts = [f"preset={preset}"] if preset else []
    texts += [settings[key] for key in sorted(settings)]
    return texts


def rows_of_others(file: Path, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the rows of a file that other searches have written.

    names: the columns that tell searches apart; rows: those of this search
    """
    if not file.is_file():
        return []
    search_of = operator.itemgetter(*names)
    this_search = set(map(search_of, rows))
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    others = []
    for row in csv.DictReader(lines):
        if not set(names) <= row.keys():
            continue  # of a file that is damaged, or was written by somebody else
        if search_of(row) not in this_search:
            others.append(row)
    return others
